"""Scripts with sparse gradients and sparse tensors."""

import random
import textwrap

from drawn_scripts.parts import Part, Script

_OPTIMIZERS = (
    "torch.optim.SparseAdam(sparse, lr=1e-3)",
    "torch.optim.SGD(sparse, lr=0.1)",
    "torch.optim.Adagrad(sparse, lr=0.01)",
    "torch.optim.SGD(sparse, lr=0.1, momentum=0.9)",
)
_DENSE = ("torch.optim.Adam(dense, lr=1e-3)", "torch.optim.AdamW(dense, lr=1e-3)", "torch.optim.SGD(dense, lr=0.1)")


def sparse(chance: random.Random, number: int) -> str:
    """One of the kinds."""
    kinds = (_skipgram, _dlrm, _bags, _factorisation, _graph, _dlrm, _tagger, _plain)
    return kinds[number % len(kinds)](chance)


def _script(title: str, definitions: str, main: str, *imports: str) -> str:
    script = Script(title, Part("", 1, "", "", definitions=definitions), imports=list(imports))
    script.whole = textwrap.dedent(main)
    return script.text()


def _skipgram(chance: random.Random) -> str:
    rows, width = chance.choice((20_000, 100_000, 250_000)), chance.choice((64, 100, 128, 300))
    batch, negatives = chance.choice((256, 1024, 4096)), chance.choice((5, 10))
    definitions = f"""
    class SkipGram(nn.Module):
        def __init__(self, rows={rows}, width={width}):
            super().__init__()
            self.inner = nn.Embedding(rows, width, sparse=True)
            self.outer = nn.Embedding(rows, width, sparse=True)

        def forward(self, centre, context, noise):
            middle = self.inner(centre)
            near = (middle * self.outer(context)).sum(-1)
            far = torch.bmm(self.outer(noise), middle.unsqueeze(-1)).squeeze(-1)
            return -(nn.functional.logsigmoid(near).mean() + nn.functional.logsigmoid(-far).sum(-1).mean())
    """
    optimizer = chance.choice(_OPTIMIZERS[:3]).replace("sparse", "model.parameters()", 1)
    return _script("Word vectors by skip-gram with negative samples.", definitions, f'''\
    model = SkipGram().cuda()
    optimizer = {optimizer}
    for step in range({chance.randint(8, 15)}):
        centre = torch.randint({rows}, ({batch},), device="cuda")
        context = torch.randint({rows}, ({batch},), device="cuda")
        noise = torch.randint({rows}, ({batch}, {negatives}), device="cuda")
        optimizer.zero_grad()
        loss = model(centre, context, noise)
        loss.backward()
        optimizer.step()
    print(loss.item())
    ''')  # fmt: skip


def _dlrm(chance: random.Random) -> str:
    width, tables = chance.choice((16, 32, 64)), chance.randint(4, 12)
    rows = [chance.choice((1000, 5000, 20_000, 100_000, 200_000)) for _ in range(tables)]
    batch, pooled = chance.choice((128, 512, 1024, 2048)), chance.choice((1, 3, 8))
    mode = chance.choice(("sum", "mean"))
    top = chance.choice((128, 256, 512))
    pairs = tables * (tables + 1) // 2
    both = chance.choice((True, False))
    definitions = f'''
    ROWS = {rows}


    class DLRM(nn.Module):
        def __init__(self, width={width}):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="{mode}", sparse=True) for n in ROWS)
            self.bottom = nn.Sequential(nn.Linear(13, {top}), nn.ReLU(), nn.Linear({top}, width), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(width + {pairs}, {top}), nn.ReLU(), nn.Linear({top}, 1))
            row, column = torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, -1)
            self.register_buffer("row", row)
            self.register_buffer("column", column)

        def forward(self, numbers, indices, offsets):
            x = self.bottom(numbers)
            vectors = [table(i, o) for table, i, o in zip(self.tables, indices, offsets)]
            stacked = torch.stack([x, *vectors], 1)
            products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.row, self.column]
            return self.top(torch.cat([x, products], 1)).squeeze(1)
    '''
    if both:
        made = f"""\
    sparse = list(model.tables.parameters())
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    optimizers = [{chance.choice(_OPTIMIZERS[:3])}, {chance.choice(_DENSE)}]
"""
    else:
        made = f"""\
    optimizers = [{
            chance.choice(
                ("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.Adagrad(model.parameters(), lr=0.01)")
            )
        }]
"""
    return _script("A recommendation model: embedding bags, dense layers and products.", definitions, f'''\
    model = DLRM().cuda()
{made}
    criterion = nn.BCEWithLogitsLoss()
    offsets = [torch.arange(0, {batch * pooled}, {pooled}, device="cuda") for _ in ROWS]
    for step in range({chance.randint(6, 12)}):
        numbers = torch.rand({batch}, 13).cuda()
        indices = [torch.randint(n, ({batch * pooled},)).cuda() for n in ROWS]
        clicks = torch.rand({batch}).round().cuda()
        loss = criterion(model(numbers, indices, offsets), clicks)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    print(loss.item())
    ''')  # fmt: skip


def _bags(chance: random.Random) -> str:
    rows, width, classes = (
        chance.choice((30_000, 95_812, 400_000)),
        chance.choice((32, 64, 128)),
        chance.choice((4, 14)),
    )
    batch, words = chance.choice((16, 64, 256)), chance.choice((20, 50, 100))
    optimizer = chance.choice(
        ("torch.optim.SGD(model.parameters(), lr=5.0)", "torch.optim.Adagrad(model.parameters(), lr=0.1)")
    )
    schedule = chance.choice((True, False))
    clip = chance.choice(("torch.nn.utils.clip_grad_norm_(model.fc.parameters(), 0.1)", ""))
    definitions = f"""
    class TextClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.EmbeddingBag({rows}, {width}, sparse=True)
            self.fc = nn.Linear({width}, {classes})

        def forward(self, text, offsets):
            return self.fc(self.embedding(text, offsets))
    """
    return _script("Classifies news by bags of words.", definitions, f'''\
    model = TextClassifier().to("cuda")
    optimizer = {optimizer}
    {"scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)" if schedule else ""}
    for step in range({chance.randint(10, 20)}):
        lengths = torch.randint(1, {words}, ({batch},))
        text = torch.randint({rows}, (int(lengths.sum()),)).cuda()
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]]).cuda()
        labels = torch.randint({classes}, ({batch},)).cuda()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text, offsets), labels)
        loss.backward()
        {clip}
        optimizer.step()
        {"scheduler.step()" if schedule else ""}
    print(loss.item())
    ''')  # fmt: skip


def _factorisation(chance: random.Random) -> str:
    users, items = chance.choice((10_000, 138_000, 300_000)), chance.choice((5000, 27_000, 100_000))
    width, batch = chance.choice((32, 64, 128)), chance.choice((512, 2048, 8192))
    layers = chance.choice((True, False))
    head = f"nn.Sequential(nn.Linear({2 * width}, {width}), nn.ReLU(), nn.Linear({width}, 1))"
    definitions = f"""
    class Ratings(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Embedding({users}, {width}, sparse=True)
            self.item = nn.Embedding({items}, {width}, sparse=True)
            self.bias = nn.Embedding({items}, 1, sparse=True)
            {f"self.head = {head}" if layers else ""}

        def forward(self, user, item):
            u, i = self.user(user), self.item(item)
            {"score = self.head(torch.cat([u, i], 1)).squeeze(1)" if layers else "score = (u * i).sum(1)"}
            return score + self.bias(item).squeeze(1)
    """
    dense = "optimizers.append(torch.optim.Adam(model.head.parameters()))" if layers else ""
    made = chance.choice(_OPTIMIZERS).replace("sparse,", "tables,", 1)
    return _script("Factorises a matrix of ratings.", definitions, f'''\
    model = Ratings().cuda()
    tables = [model.user.weight, model.item.weight, model.bias.weight]
    optimizers = [{made}]
    {dense}
    for step in range({chance.randint(8, 14)}):
        user, item = torch.randint({users}, ({batch},)), torch.randint({items}, ({batch},))
        rating = torch.rand({batch}) * 5
        user, item, rating = user.cuda(), item.cuda(), rating.cuda()
        loss = nn.functional.mse_loss(model(user, item), rating)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    print(loss.item())
    ''')  # fmt: skip


def _graph(chance: random.Random) -> str:
    nodes, degree = chance.choice((2708, 10_000, 40_000)), chance.choice((4, 8, 16))
    features, hidden, classes = chance.choice((128, 500, 1433)), chance.choice((16, 64, 256)), chance.choice((3, 7, 40))
    product = chance.choice(("torch.spmm(graph, x)", "torch.sparse.mm(graph, x)", "graph @ x"))
    layout = chance.choice(("", "", ".to_sparse_csr()"))
    dropout = chance.choice((0.0, 0.5))
    definitions = f"""
    class Layer(nn.Module):
        def __init__(self, before, after):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(before, after) / before**0.5)
            self.bias = nn.Parameter(torch.zeros(after))

        def forward(self, x, graph):
            x = x @ self.weight
            return {product} + self.bias


    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer({features}, {hidden}), Layer({hidden}, {classes})

        def forward(self, x, graph):
            x = torch.relu(self.first(x, graph))
            x = nn.functional.dropout(x, {dropout}, self.training)
            return torch.log_softmax(self.second(x, graph), 1)
    """
    return _script("A graph convolutional network on a sparse adjacency matrix.", definitions, f'''\
    ends = torch.randint({nodes}, (2, {nodes * degree}))
    graph = torch.sparse_coo_tensor(ends, torch.full((ends.shape[1],), 1 / {degree}), ({nodes}, {nodes})).coalesce()
    graph = graph{layout}.cuda()
    x, labels = torch.rand({nodes}, {features}).cuda(), torch.randint({classes}, ({nodes},)).cuda()
    train = torch.arange({nodes // 5}).cuda()
    model = GCN().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range({chance.randint(6, 12)}):
        model.train()
        optimizer.zero_grad()
        output = model(x, graph)
        loss = nn.functional.nll_loss(output[train], labels[train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x, graph).argmax(1) == labels).float().mean()
    print(loss.item(), accuracy.item())
    ''')  # fmt: skip


def _tagger(chance: random.Random) -> str:
    rows, width, hidden = (
        chance.choice((10_000, 50_000, 120_000)),
        chance.choice((64, 128, 200)),
        chance.choice((128, 256)),
    )
    batch, length, tags = chance.choice((16, 32, 64)), chance.choice((32, 64, 128)), chance.choice((9, 17))
    cell, layers = chance.choice(("LSTM", "GRU")), chance.choice((1, 2))
    definitions = f"""
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding({rows}, {width}, padding_idx=0, sparse=True)
            self.rnn = nn.{cell}({width}, {hidden}, {layers}, batch_first=True, bidirectional=True)
            self.tags = nn.Linear({2 * hidden}, {tags})

        def forward(self, words):
            return self.tags(self.rnn(self.words(words))[0])
    """
    made = chance.choice(_OPTIMIZERS).replace("sparse,", "model.words.parameters(),", 1)
    return _script("Tags words: a sparse embedding under a recurrent network.", definitions, f'''\
    model = Tagger().cuda()
    dense = [*model.rnn.parameters(), *model.tags.parameters()]
    optimizers = [{made}, {chance.choice(_DENSE)}]
    for step in range({chance.randint(6, 10)}):
        words = torch.randint({rows}, ({batch}, {length})).cuda()
        tags = torch.randint({tags}, ({batch}, {length})).cuda()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none={chance.choice((True, True, False))})
        loss.backward()
        nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    print(loss.item())
    ''')  # fmt: skip


def _plain(chance: random.Random) -> str:
    rows, width, batch = chance.choice((50_000, 200_000)), chance.choice((64, 256)), chance.choice((256, 2000))
    times = chance.choice((2, 3))
    return _script("An embedding that is used several times before each step.", "", f'''\
    table = nn.Embedding({rows}, {width}, sparse=True).cuda()
    head = nn.Linear({width}, 1).cuda()
    optimizer = {chance.choice(_OPTIMIZERS).replace("sparse,", "table.parameters(),", 1)}
    other = torch.optim.Adam(head.parameters())
    for step in range({chance.randint(6, 10)}):
        for part in range({times}):
            index = torch.randint({rows}, ({batch}, {chance.choice((1, 8))})).cuda()
            loss = head(table(index).mean(1)).square().mean() / {times}
            loss.backward()
        if step == 0:
            print(table.weight.grad.coalesce().values().shape)
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    print(loss.item())
    ''')  # fmt: skip
