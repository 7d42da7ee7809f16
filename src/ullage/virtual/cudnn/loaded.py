"""Reads what convolutions need from `data/` when it is imported: forks of this process save half a second."""

from ullage.virtual.cudnn.formulas import DATA, FILTER, FORWARD
from ullage.virtual.cudnn.network import read_network
from ullage.virtual.cudnn.workspaces import ASKED, DATA_FOLDER, PLAN_NETWORK, PLAN_TREES, table, tables, trees, trees_of

for path in tables(DATA_FOLDER).values():
    table(path)
for name in (PLAN_TREES, *map(trees_of, ASKED)):
    trees(DATA_FOLDER / name)
for direction in (FORWARD, DATA, FILTER):
    read_network(DATA_FOLDER / PLAN_NETWORK, direction)
