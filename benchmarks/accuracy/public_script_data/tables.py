"""Time series, and who rated or took what."""

import pickle

import numpy as np

from .maker import Maker


def tables(maker: Maker) -> None:
    """Two years of hours with seven variables, and ratings of films."""
    dates = np.datetime64("2016-07-01T00") + np.arange(17_420).astype("timedelta64[h]")
    series = maker.random.standard_normal((len(dates), 7)).cumsum(0)
    lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for date, row in zip(dates, series, strict=True):
        lines.append(f"{date} ".replace("T", " ").strip() + ":00:00," + ",".join(f"{value:.3f}" for value in row))
    maker.write(maker.data / "ETTh1.csv", "\n".join(lines) + "\n")
    columns = [maker.random.integers(1, top, 100_000) for top in (6041, 3953, 6)]
    ratings = (f"{user}::{item}::{rating}::978300760" for user, item, rating in zip(*columns, strict=True))
    maker.write(maker.data / "ml" / "ratings.dat", "\n".join(ratings) + "\n")


def pairs(maker: Maker) -> None:
    """Who took what, for recommendations: 8,000 users and 12,000 items."""
    for split, count in (("train", 30), ("test", 6)):
        rows = [" ".join(map(str, [user, *maker.random.choice(12_000, count, replace=False)])) for user in range(8_000)]
        maker.write(maker.src / "huangtinglin+NGCF-PyTorch/Data/gowalla" / f"{split}.txt", "\n".join(rows) + "\n")


def speeds(maker: Maker) -> None:
    """Speeds at 207 places."""
    speeds = maker.random.integers(0, 70, (2000, 207))
    lines = [",".join(map(str, range(207))), *(",".join(map(str, row)) for row in speeds)]
    maker.write(maker.src / "hazdzz+STGCN/data/metr-la/vel.csv", "\n".join(lines) + "\n")


def traffic(maker: Maker) -> None:
    """Speeds at 207 places, flows at 307, power at 137, and films of 2,000 people."""
    src, random = maker.src, maker.random
    near = (random.random((207, 207)) < 0.05).astype("f4")
    stgcn = src / "FelixOpolka+STGCN-PyTorch/data"
    stgcn.mkdir(parents=True, exist_ok=True)
    np.save(stgcn / "adj_mat.npy", near)
    np.save(stgcn / "node_values.npy", random.random((1_500, 207, 2), "f4"))
    flows = src / "LeiBAI+AGCRN/data/PeMSD4/pems04.npz"
    flows.parent.mkdir(parents=True, exist_ok=True)
    np.savez(flows, data=random.random((1_800, 307, 3), "f4"))
    series = random.random((2_600, 137)).round(4)
    maker.write(maker.data / "solar.txt", "\n".join(",".join(map(str, row)) for row in series) + "\n")
    (src / "nnzhan+MTGNN/model").mkdir(parents=True, exist_ok=True)
    films = [f"{user} {film}" for user in range(1, 2_001) for film in random.integers(1, 3_417, int(20 + user % 150))]
    maker.write(src / "pmixer+SASRec.pytorch/python/data/ml-1m.txt", "\n".join(films) + "\n")


def sessions(maker: Maker) -> None:
    """What people clicked, watched and bought, and what 38 machines reported."""
    clicks = maker.src / "CRIPAC-DIG+SR-GNN/datasets/sample"
    for split, count in (("train", 6_000), ("test", 1_500)):
        lengths = maker.random.integers(2, 20, count)
        rows = [maker.random.integers(1, 310, length).tolist() for length in lengths]
        maker.write(clicks / f"{split}.txt", pickle.dumps((rows, maker.random.integers(1, 310, count).tolist())))
    for split, each in (("train", 60), ("test", 10)):
        lines = [f"{u} {film} 1" for u in range(1_500) for film in maker.random.choice(3_000, each, replace=False)]
        maker.write(maker.src / f"graytowne+caser_pytorch/datasets/ml1m/test/{split}.txt", "\n".join(lines) + "\n")
    films = maker.data / "films" / "pro_sg"
    maker.write(films / "unique_sid.txt", "".join(f"{film}\n" for film in range(12_000)))
    begin = 0
    for split, people in (("train", 6_000), ("validation_tr", 1_000), ("test_tr", 1_000)):
        for name in (split, split.replace("_tr", "_te")) if "_" in split else (split,):
            seen = [maker.random.choice(12_000, 40, replace=False) for _ in range(people)]
            lines = [f"{begin + user},{film}" for user, row in enumerate(seen) for film in row]
            maker.write(films / f"{name}.csv", "uid,sid\n" + "\n".join(lines) + "\n")
        begin += people
    machines = maker.data / "SMD"
    machines.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 20_000), ("test", 8_000)):
        np.save(machines / f"SMD_{name}.npy", maker.random.random((count, 38)))
    np.save(machines / "SMD_test_label.npy", (maker.random.random(8_000) < 0.05).astype("f4"))
