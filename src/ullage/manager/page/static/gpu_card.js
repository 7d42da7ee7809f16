// A card of a GPU. Words of users become text only: Vue puts them into text nodes and attributes.
export default {
  template: `
    <section :class="['card', card.state]" :aria-label="card.title">
      <div class="head">
        <h2>{{ card.title }}</h2><span class="model">{{ card.model }}</span><span class="badge">{{ card.badge }}</span>
      </div>
      <div class="bands" role="img" :aria-label="card.memory">
        <div v-for="band in card.bands" :key="band.id" :class="['band', band.colour]" :title="band.title"
             :style="{ width: band.width }">
          <div class="used" :style="{ width: band.used }"></div>
          <div class="beyond" :style="{ width: band.beyond }"></div>
        </div>
        <div class="band foreign" :style="{ width: card.foreign }"></div>
      </div>
      <p class="figures">{{ card.memory }}</p>
      <ul class="jobs">
        <li v-for="job in card.jobs" :key="job.id">
          <span :class="['dot', job.colour]" aria-hidden="true"></span><a :href="job.href">{{ job.name }}</a>
          <span class="user">{{ job.user }}</span><span :class="{ over: job.over }">{{ job.figures }}</span>
        </li>
        <li v-if="card.more">{{ card.more }}</li>
      </ul>
      <div v-for="curve in card.curves" :key="curve.name" class="curve">
        <span class="name">{{ curve.name }}</span>
        <svg :viewBox="curve.box" preserveAspectRatio="none" role="img" :aria-label="curve.about">
          <path :d="curve.path" />
        </svg>
        <span class="value">{{ curve.value }}</span>
      </div>
      <p class="figures">{{ card.unknown }}</p>
    </section>
  `,
  props: { card: Object },
};
