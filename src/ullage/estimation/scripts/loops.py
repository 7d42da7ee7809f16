"""Early ends of a script's own loops, so that the script soon reaches its end.

`compiled` compiles source so that each `for` and `while` asks at the head of an iteration whether to continue. This
covers the script, the modules next to it, and modules of libraries that train, but no functions that a library compiles
(Numba's `@njit`), and no generators, whose readers count on all items.

A loop that trains ends when training has settled and been watched for long enough (`leaving`). It has two rounds,
unless the first took long: the second round of a loop over tasks, folds or runs may start with memory that the first
has left. Any other loop ends when its last iterations called the same modules, requested the same memory and kept none
of it: a validation, or the steps of a sampler. Loops that call no module, such as one that merges weights, never end
early, nor do those inside a forward pass that is to be differentiated. Before training has settled, a loop must also
have taken long, because training may need its results, and must not have differentiated anything: a step may consist of
many batches.

Periodic work (`if step % 500 == 0:`) would come long after that. So when training has settled, such a condition holds
once, if it was evaluated in several steps and held in one of them at most.
"""

import ast
import builtins
import dis
import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from inspect import CO_GENERATOR
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from ullage.estimation.scripts.frameworks import OURS, is_own
from ullage.virtual.call.native import in_backward
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.gpu import VirtualGPU

LEAST_ROUNDS = 2  # of a loop that trains, unless the first took as long as `LONGEST_LOOP`
SAME_ITERATIONS = 5  # in a row, before a loop that does not train ends early; a DataLoader ends before that
ASKED_IN_STEPS = 3  # before a condition is assumed to test the number of the step
LONGEST_LOOP = 20.0  # seconds after which a loop has taken long
# Libraries that `when_to_stop` ends by their own switches, and those whose loops are parts of a step.
_FRAMEWORKS = {"accelerate", "deepspeed", "ignite", "lightning", "megatron", "pytorch_lightning", "transformers"}
_LEFT_ALONE = frozenset({*_FRAMEWORKS, "torch", "triton", "ullage"})
_EACH, _AGAIN, _DUE = "__ullage_each__", "__ullage_again__", "__ullage_due__"


class LoopWatcher:
    """Watches the loops of a script's own code; `steps` and `passes` count training's steps and backward passes."""

    def __init__(self, card: VirtualGPU, steps: Callable[[], int], passes: Callable[[], int], least_steps: int) -> None:
        self.card, self.steps, self.passes, self.least_steps = card, steps, passes, least_steps
        self.settled = False  # training has settled: loops that only repeat may end
        self.leaving = False  # and has been watched for long enough: loops that train end, too
        self._periods: dict[tuple[str, int, int], _Period] = {}

    def install(self, replacements: Replacements) -> None:
        vars(builtins).update(_unless_compiled(self._each, self._again, self._due))
        finder = _Finder()
        sys.meta_path.insert(0, finder)

        def remove() -> None:
            sys.meta_path.remove(finder)
            vars(builtins).update(
                {_EACH: lambda iterable: iterable, _AGAIN: lambda: lambda: True, _DUE: lambda holds, *place: holds}
            )

        replacements.on_undo(remove)  # code that is compiled already may run once more

    def _each(self, iterable: Any) -> Any:
        if self._is_differentiated():
            return iterable
        try:
            return _Each(iter(iterable), Loop(self))
        except TypeError:
            return iterable  # the script's own line raises the error

    def _again(self) -> Callable[[], bool]:
        if self._is_differentiated():
            return lambda: True
        loop = Loop(self)
        return lambda: not loop.is_over()

    @property
    def is_something_due(self) -> bool:
        """Whether periodic work of the script is still to come."""
        return any(period.is_due for period in self._periods.values())

    def _due(self, holds: Any, *place: Any) -> Any:
        """Return a condition such as `step % 500 == 0`, or true to bring it forward."""
        if not isinstance(holds, bool) or self.card.origins.is_inside_module or in_backward():
            return holds
        period = self._periods.setdefault(place, _Period())
        period.ask(self.steps(), holds)
        if not self.settled or not period.is_due:
            return holds
        period.was_brought_forward = True
        self.card.note("epochs", "work that the script does every N steps ran early, so that it counts")
        return True

    def _is_differentiated(self) -> bool:
        return in_backward() or self.card.origins.is_inside_module and torch.is_grad_enabled()


def _unless_compiled(
    each: Callable[[Any], Any], again: Callable[[], Callable[[], bool]], due: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Return the functions that loops and conditions call; PyTorch's compiler, which traces them, sees plain ones."""
    is_compiling = torch.compiler.is_compiling

    def each_item(iterable: Any) -> Any:
        return iterable if is_compiling() else each(iterable)

    def go_on() -> Callable[[], bool]:
        return (lambda: True) if is_compiling() else again()

    def is_due(holds: Any, *place: Any) -> Any:
        return holds if is_compiling() else due(holds, *place)

    return {_EACH: each_item, _AGAIN: go_on, _DUE: is_due}


class _Period:
    """A condition on the number of a step: in how many steps it was evaluated, and in how many it held."""

    def __init__(self) -> None:
        self._step = -1
        self._questions = self._held = 0
        self.was_brought_forward = False

    def ask(self, step: int, holds: bool) -> None:
        self._held += holds
        if step != self._step:
            self._step, self._questions = step, self._questions + 1

    @property
    def is_due(self) -> bool:
        """Whether it is rare: frequent work is seen anyway."""
        return not self.was_brought_forward and self._questions >= ASKED_IN_STEPS and self._held <= 1


class _Each:
    """The items of a loop until it is over. It keeps no item, so that the script can free them."""

    __slots__ = ("_items", "_loop")

    def __init__(self, items: Iterator[Any], loop: "Loop") -> None:
        self._items, self._loop = items, loop

    def __iter__(self) -> "_Each":
        return self

    def __next__(self) -> Any:
        if self._loop.is_over():
            raise StopIteration
        return next(self._items)


class Loop:
    """One run of a loop: the work of its last iterations on the GPU."""

    def __init__(self, watcher: LoopWatcher) -> None:
        self._watcher, self._memory, self._origins = watcher, watcher.card.memory, watcher.card.origins
        self._around = self._origins.module
        self._marks, self._rounds = [self._mark()], 0
        self._first_step, self._first_pass, self._begin = watcher.steps(), watcher.passes(), time.monotonic()

    def is_over(self) -> bool:
        """Return whether the loop ends; called at the head of each iteration."""
        if len(self._memory.requests) == self._marks[-1][0]:
            return False  # the iteration did not use the GPU
        self._marks, self._rounds = [*self._marks[-SAME_ITERATIONS:], self._mark()], self._rounds + 1
        watcher = self._watcher
        trained, took_long = watcher.steps() - self._first_step, time.monotonic() - self._begin > LONGEST_LOOP
        if trained:
            enough = self._rounds >= LEAST_ROUNDS or took_long
            if watcher.leaving and trained >= watcher.least_steps and enough:
                watcher.card.note("epochs", "training loops were cut short once their memory use repeated")
                return True
            return False
        gathers = watcher.passes() > self._first_pass  # gradients, for a step that is still to come
        if (watcher.settled or (took_long and not gathers)) and self._repeats():
            watcher.card.note("epochs", "loops that do not train were cut short once they repeated")
            return True
        return False

    def _mark(self) -> tuple[int, int, int]:
        """Return the length of the request log, the allocated bytes, and the number of requests."""
        return len(self._memory.requests), self._memory.allocator.allocated, len(self._memory.spans)

    def _repeats(self) -> bool:
        marks = self._marks
        if len(marks) <= SAME_ITERATIONS or len({allocated for _, allocated, _ in marks[1:]}) > 1:
            return False
        pairs = list(zip(marks, marks[1:], strict=False))
        rounds = [self._memory.requests.sizes(begin[0], end[0]) for begin, end in pairs]
        origins = [[span.origin for span in self._memory.spans[begin[2] : end[2]]] for begin, end in pairs]
        if (
            not rounds[0]
            or any(sizes != rounds[0] for sizes in rounds)
            or any(those != origins[0] for those in origins)
        ):
            return False
        table = self._origins.table()
        return any(table[number][1] != self._around for number in origins[0])


def compiled(source: bytes, path: str) -> CodeType:
    """Compile source as Python does, except that loops and conditions on steps call Ullage."""
    tree = ast.fix_missing_locations(_AskingLoops(path).visit(ast.parse(source, path)))
    code: CodeType = compile(tree, path, "exec", dont_inherit=True)
    return code


class _AskingLoops(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path, self._whiles = path, 0

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        node.test = _AskingConditions(self._path).visit(node.test)
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        node.iter = ast.copy_location(_call(_EACH, node.iter), node.iter)
        return node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        self._whiles += 1
        name = f"__ullage_while_{self._whiles}__"
        begin = ast.Assign([ast.Name(name, ast.Store())], _call(_AGAIN))
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [_call(name), node.test]), node.test)
        return [ast.copy_location(begin, node), node]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        compiled_by_others = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        return node if compiled_by_others or any(map(_yields, node.body)) else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        functions = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.ClassDef))
        for part in functions:
            self.visit(part)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node


class _AskingConditions(ast.NodeTransformer):
    """Rewrites `i % n == m`, `not i % n` and `divisible_by(i, n)`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def visit_Compare(self, node: ast.Compare) -> Any:
        equal = len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq)
        return self._with_question(node) if equal and any(map(_is_remainder, [node.left, *node.comparators])) else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not) and _is_remainder(node.operand):
            return self._with_question(node)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func).rpartition(".")[2]
        return self._with_question(node) if "divisible" in name and len(node.args) == 2 else node

    def _with_question(self, node: ast.expr) -> ast.expr:
        place = [ast.Constant(part) for part in (self._path, node.lineno, node.col_offset)]
        return ast.copy_location(_call(_DUE, node, *place), node)


def _is_remainder(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _yields(node: ast.AST) -> bool:
    """Return whether a part of a function makes it a generator; inner functions do not count."""
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return False
    return any(map(_yields, ast.iter_child_nodes(node)))


class _Finder:
    """Finds modules for `compiled`: those of the script's folder and the working folder, and those that train."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package in _LEFT_ALONE or package in sys.stdlib_module_names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if not is_own(spec.origin) and not _trains(spec.loader.get_data(spec.origin)):
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def _trains(source: bytes) -> bool:
    """Return whether a module makes backward passes and optimizer steps itself.

    >>> _trains(b"for x in loader:\\n    loss(x).backward()\\n    optimizer.step()"), _trains(b"loss.backward()")
    (True, False)
    """
    return b".backward(" in source and b".step(" in source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compiled(self.get_data(path), path)  # bytecode that was compiled in another way is neither read nor left


def takes_single_items(frame: FrameType) -> bool:
    """Return whether a frame of the script's own code reads an iterator by `next` and not by a loop.

    A generator that loops over the iterator reads for its caller.
    """
    code = frame.f_code
    if not is_own(code.co_filename):
        return False
    if dis.opname[code.co_code[frame.f_lasti]] != "FOR_ITER":
        return True
    asks = frame.f_back
    while asks is not None and asks.f_code.co_filename.startswith(OURS):
        asks = asks.f_back
    return bool(code.co_flags & CO_GENERATOR) and asks is not None and takes_single_items(asks)
