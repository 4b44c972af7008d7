"""Running a chat template that nobody here wrote: in a sandbox, with bounds on time, memory and output.

Jinja's immutable sandbox keeps a template from Python's internals and from changing what it is given. It does not
keep it from working forever or from filling the memory, so here every value that a template makes is weighed: strings,
lists and mappings when they are written, joined, multiplied, filtered or returned. Loops look at the clock. What could
grow without being weighed (number formatting, padding, unknown filters and methods of strings) is not there.

Not here: what a chat is, and which part of its text an assistant wrote (`chat.py`).
"""

import contextlib
import contextvars
import functools
import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, MappingView
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_SOURCE = 1 << 18
"""The most characters of a template."""
MAX_VALUE = 1 << 22
"""The most characters or elements of one value, and of the rendered text."""
MAX_WORK = 1 << 26
"""The most characters and elements that one rendering may make, all values together."""
MAX_SECONDS = 10.0
"""The longest that one rendering may take."""
_MAX_BITS = 4096

_STRING_METHODS = frozenset(
    "strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith removeprefix removesuffix "
    "upper lower title capitalize casefold swapcase find rfind index rindex count isalpha isalnum isdigit isdecimal "
    "isnumeric isspace isupper islower istitle isascii isidentifier replace join".split()
)
_FILTERS = frozenset(
    "abs capitalize count d default dictsort e escape first float forceescape groupby indent int items last length "
    "list lower map max min reject rejectattr replace reverse safe select selectattr sort string title trim unique "
    "upper wordcount".split()
)


class LimitError(Exception):
    """A template went past a bound; the text says which."""


class _Budget:
    def __init__(self) -> None:
        self.work = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError(f"it ran for more than {MAX_SECONDS:g} s")

    def take(self, value: Any) -> Any:
        """The value, once it is known to be within bounds."""
        self.tick()
        if isinstance(value, str):
            self.spend(len(value), len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.spend(*_weigh(value))
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise LimitError(f"it made an integer of more than {_MAX_BITS} bits")
        return value

    def spend(self, size: int, work: int) -> None:
        """Account for a value of `size` characters and elements that took `work` to make."""
        self.work += work
        if size > MAX_VALUE:
            raise LimitError(f"it made a value of more than {MAX_VALUE} characters")
        if self.work > MAX_WORK:
            raise LimitError(f"it made more than {MAX_WORK} characters in all")


def _weigh(value: Any) -> tuple[int, int]:
    """(characters and elements as they would be written out, elements); shared parts count each time they stand."""
    size, elements, todo = 0, 0, [value]
    while todo and size <= MAX_VALUE:
        part = todo.pop()
        elements += 1
        size += 1 + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, Mapping):
            todo.extend(part.keys())
            todo.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset, MappingView)):
            todo.extend(part)  # pyright: ignore[reportArgumentType]
    return size, elements


_BUDGET: contextvars.ContextVar[_Budget] = contextvars.ContextVar("riftco_chat_budget")


@contextlib.contextmanager
def bounded() -> Generator[_Budget, None, None]:
    """A budget for what runs in the block, on this thread."""
    token = _BUDGET.set(_Budget())
    try:
        yield _BUDGET.get()
    finally:
        _BUDGET.reset(token)


class _Meter(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template so that loops look at the clock and what it writes down is weighed."""

    def _call(self, name: str, node: jinja2.nodes.Expr, arguments: list[Any]) -> jinja2.nodes.Call:
        function = jinja2.nodes.EnvironmentAttribute(name, lineno=node.lineno)
        return jinja2.nodes.Call(function, arguments, [], None, None, lineno=node.lineno)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(self._call("tick", node, []), lineno=node.lineno))  # pyright: ignore[reportArgumentType]
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("join_all", node, list(node.nodes))

    def _literal(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._call("take", node, [node])

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("take_slice", node, [node]) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("compared", node, [node])


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: what stands between was written by the assistant."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """A block whose text is given to `mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """The text between two marks, which the context names."""
        begin, end = MARKS.get(("", ""))
        return f"{begin}{caller()}{end}"


MARKS: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("riftco_chat_marks")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with bounds; templates run only inside `bounded()`."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,
            finalize=self.take,
        )
        kept = {name: self.filters[name] for name in _FILTERS} | {"tojson": to_json, "join": _join}
        guards = {"replace": _guard_replace, "indent": _guard_indent}
        self.filters = {name: self._metered(function, guards.get(name)) for name, function in kept.items()}
        self.tests = {name: self._metered(function, None) for name, function in self.tests.items()}
        self.globals = {
            "range": jinja2.sandbox.safe_range,
            # The class itself would offer dict.update, which changes its argument.
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.concat = self._concat  # pyright: ignore[reportAttributeAccessIssue]

    def tick(self) -> None:
        """Look at the clock."""
        _BUDGET.get().tick()

    def take(self, value: Any) -> Any:
        """The value, once it is known to be within bounds."""
        return _BUDGET.get().take(value)

    def take_slice(self, value: Any) -> Any:
        """A part of a value: jinja cuts it without asking the environment."""
        self.tick()
        if isinstance(value, (str, list, tuple)):
            _BUDGET.get().spend(len(value), len(value))
        return value

    def compared(self, value: Any) -> Any:
        """What a comparison came to; looking through a long value takes time."""
        self.tick()
        return value

    def join_all(self, *values: Any) -> str:
        """`a ~ b`."""
        return self._concat([str(self.take(value)) for value in values])

    def _concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        size = sum(map(len, parts))
        _BUDGET.get().spend(size, size)
        return "".join(parts)

    def _metered(self, function: Callable[..., Any], guard: Callable[..., None] | None) -> Callable[..., Any]:
        passed = getattr(function, "jinja_pass_arg", None)

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if guard is not None:
                guard(*(args[1:] if passed is not None else args), **kwargs)
            return self.take(function(*args, **kwargs))

        return metered

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        __self.take((args, kwargs))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        if isinstance(owner, str) and name == "join" and args:
            args = (_measured(args[0], owner), *args[1:])
        elif isinstance(owner, str) and name == "replace":
            _guard_replace(owner, *args, **kwargs)
        return __self.take(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: D102
        for value in (left, right):
            if isinstance(value, int):
                self.take(value)
        if operator == "%" and isinstance(left, (str, bytes)):
            raise jinja2.exceptions.SecurityError("formatting with % is not available to chat templates")
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _BUDGET.get().spend(len(left) + len(right), len(left) + len(right))
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    _BUDGET.get().spend(len(sequence) * max(times, 0), 0)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise LimitError(f"it made an integer of more than {_MAX_BITS} bits")
        return self.take(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> None:  # noqa: D102
        return None  # str.format pads without bound; is_safe_attribute refuses it

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: D102
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """A template with its loops and values metered; must be called, and rendered, inside `bounded()`.

    Raises:
        LimitError: the source is too long.
        jinja2.TemplateError: it is not a template of this sandbox.
    """
    if len(source) > MAX_SOURCE:
        raise LimitError(f"it is longer than {MAX_SOURCE} characters")
    environment = _environment()
    tree = _Meter().visit(environment.parse(source)).set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.globals)


@functools.cache
def _environment() -> Environment:
    return Environment()


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a template, within the bounds of this module.

    Raises:
        LimitError: a bound was passed.
        jinja2.TemplateError: the template is wrong, or raised.
    """
    with bounded() as budget:
        parts, size = [], 0
        for part in compile_template(source).generate(**variables):
            parts.append(part)
            size += len(part)
            budget.spend(size, len(part))
        return "".join(parts)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: characters as they are, nothing escaped for HTML."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise LimitError(f"tojson: indent must be 0 .. 16; it asked for {indent!r}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
    _BUDGET.get().take(value)
    parts, size = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        size += len(part)
        _BUDGET.get().spend(size, len(part))
    return "".join(parts)


def _measured(parts: Any, separator: str) -> list[Any]:
    """The parts as a list, once it is known that joining them stays within bounds."""
    parts = list(parts)
    _BUDGET.get().spend(_weigh(parts)[0] + len(parts) * len(separator), len(parts))
    return parts


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    """The filter `join`."""
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return str(d).join(map(str, _measured(value, str(d))))


def _guard_replace(s: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    text, old, new = str(s), str(old), str(new)
    times = len(text) + 1 if not old else text.count(old)
    _BUDGET.get().spend(len(text) + times * len(new), 0)


def _guard_indent(s: Any, width: Any = 4, *args: Any, **kwargs: Any) -> None:
    each = width if isinstance(width, int) else len(str(width))
    _BUDGET.get().spend(len(str(s)) + (str(s).count("\n") + 1) * max(each, 0), 0)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without private names, which libraries would call without asking the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "namespace"

    @staticmethod
    def _check(name: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not have the name {name!r}")


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    """The date and time of now. Raises LimitError for a form longer than any that dates need."""
    if len(form) > 100:
        raise LimitError("strftime_now: a form of at most 100 characters is required")
    import datetime

    return datetime.datetime.now().strftime(form)
