/* A decision tree as scikit-learn grows it with criterion="entropy", max_features, max_leaf_nodes and
   min_samples_leaf: best split first.

   scikit-learn computes the entropy over all classes at every place where a node could be split. With a thousand classes
   that takes hours. Here the sums are kept up to date while a sample moves from one side to the other. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t start, end, feature, place; /* its samples; the split: samples whose rank is at most `place` go left */
    int64_t left, right;
    double gain;
} Node;

typedef struct {
    const int32_t *ranks; /* of all samples by a feature, feature after feature */
    const int32_t *labels;
    int64_t samples, features, tried, classes, least;
    int64_t *order;
    double *step; /* g(k + 1) - g(k), where g(k) = k log2 k */
    int64_t *left, *right, *drawn;
    uint64_t *keys, *spare;
    uint64_t seed;
} Work;

static double g(double count) { return count > 0 ? count * log2(count) : 0; }

static uint64_t random_number(uint64_t *seed) { /* splitmix64 */
    uint64_t mixed = *seed += 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    return mixed ^ mixed >> 31;
}

static int by_key(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

/* Sorts by the rank in the upper half of a key: ranks have at most 20 bits. */
static void sort(Work *work, int64_t count) {
    uint64_t *keys = work->keys, *spare = work->spare;
    if (count <= 64) {
        for (int64_t i = 1; i < count; i++) {
            uint64_t key = keys[i];
            int64_t j = i;
            for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
            keys[j] = key;
        }
        return;
    }
    if (count < 1024) {
        qsort(keys, count, sizeof *keys, by_key);
        return;
    }
    for (int shift = 32; shift < 52; shift += 10) {
        int64_t places[1025] = {0};
        for (int64_t i = 0; i < count; i++) places[(keys[i] >> shift & 1023) + 1]++;
        for (int i = 0; i < 1024; i++) places[i + 1] += places[i];
        for (int64_t i = 0; i < count; i++) spare[places[keys[i] >> shift & 1023]++] = keys[i];
        uint64_t *swapped = keys;
        keys = spare, spare = swapped;
    } /* two passes: the result is where the keys were */
}

static void find_split(Work *work, Node *node) {
    int64_t count = node->end - node->start, *order = work->order + node->start;
    double whole = 0, best = -1;
    int64_t found = 0;
    node->feature = -1, node->gain = -1;
    memset(work->right, 0, work->classes * sizeof *work->right);
    for (int64_t i = 0; i < count; i++) whole += work->step[work->right[work->labels[order[i]]]++];
    if (count < 2 || g(count) - whole < 1e-9) return;
    for (int64_t visited = 0; visited < work->features && (visited < work->tried || !found); visited++) {
        int64_t other = visited + random_number(&work->seed) % (work->features - visited);
        int64_t feature = work->drawn[other];
        work->drawn[other] = work->drawn[visited], work->drawn[visited] = feature;
        const int32_t *ranks = work->ranks + feature * work->samples;
        int32_t least = ranks[order[0]], most = least;
        for (int64_t i = 0; i < count; i++) {
            int32_t rank = ranks[order[i]];
            least = rank < least ? rank : least, most = rank > most ? rank : most;
            work->keys[i] = (uint64_t)rank << 32 | (uint32_t)work->labels[order[i]];
        }
        if (least == most) continue;
        found++;
        sort(work, count);
        double on_left = 0, on_right = whole;
        for (int64_t i = 0; i + 1 < count; i++) {
            int64_t label = work->keys[i] & 0xFFFFFFFFu;
            on_left += work->step[work->left[label]++];
            on_right -= work->step[--work->right[label]];
            if (work->keys[i] >> 32 == work->keys[i + 1] >> 32) continue;
            if (i + 1 < work->least || count - i - 1 < work->least) continue;
            double gain = g(count) - whole - g(i + 1) + on_left - g(count - i - 1) + on_right;
            if (gain > best) best = gain, node->feature = feature, node->place = work->keys[i] >> 32;
        }
        for (int64_t i = 0; i + 1 < count; i++) { /* as it was before */
            int64_t label = work->keys[i] & 0xFFFFFFFFu;
            work->left[label] = 0, work->right[label]++;
        }
    }
    node->gain = best;
}

/* Grows a tree; `order` becomes the samples by leaf. Returns the number of nodes. */
int64_t grow(const int32_t *ranks, const int32_t *labels, int64_t samples, int64_t features, int64_t tried,
             int64_t classes, int64_t leaves, int64_t least, uint64_t seed, int64_t *order, Node *nodes) {
    Work work = {ranks, labels, samples, features, tried, classes, least, order};
    work.seed = seed;
    work.step = malloc((samples + 1) * sizeof *work.step);
    work.left = calloc(classes, sizeof *work.left), work.right = calloc(classes, sizeof *work.right);
    work.drawn = malloc(features * sizeof *work.drawn);
    work.keys = malloc(samples * sizeof *work.keys), work.spare = malloc(samples * sizeof *work.spare);
    int64_t *heap = malloc(2 * leaves * sizeof *heap), waiting = 0, count = 1;
    for (int64_t k = 0; k <= samples; k++) work.step[k] = g(k + 1) - g(k);
    for (int64_t i = 0; i < features; i++) work.drawn[i] = i;
    nodes[0] = (Node){.start = 0, .end = samples, .left = -1, .right = -1};
    find_split(&work, &nodes[0]);
    if (nodes[0].feature >= 0) heap[waiting++] = 0;
    for (int64_t made = 1; waiting && made < leaves; made++) {
        Node *node = &nodes[heap[0]];
        int64_t last = heap[--waiting], hole = 0;
        for (int64_t child; (child = 2 * hole + 1) < waiting; hole = child) {
            if (child + 1 < waiting && nodes[heap[child + 1]].gain > nodes[heap[child]].gain) child++;
            if (nodes[last].gain >= nodes[heap[child]].gain) break;
            heap[hole] = heap[child];
        }
        heap[hole] = last;
        const int32_t *by = ranks + node->feature * samples;
        int64_t low = node->start, high = node->end;
        while (low < high) {
            int64_t sample = order[low];
            if (by[sample] <= node->place) low++;
            else order[low] = order[--high], order[high] = sample;
        }
        node->left = count, node->right = count + 1;
        nodes[count++] = (Node){.start = node->start, .end = low, .left = -1, .right = -1};
        nodes[count++] = (Node){.start = low, .end = node->end, .left = -1, .right = -1};
        for (int64_t child = count - 2; child < count; child++) {
            find_split(&work, &nodes[child]);
            if (nodes[child].feature < 0) continue;
            int64_t place = waiting++;
            for (int64_t above; place && nodes[heap[above = (place - 1) / 2]].gain < nodes[child].gain; place = above)
                heap[place] = heap[above];
            heap[place] = child;
        }
    }
    free(work.step), free(work.left), free(work.right), free(work.drawn), free(work.keys), free(work.spare), free(heap);
    return count;
}
