"""Chat templates: the one door to jinja2.

A template gets what Transformers 5 gives it, inside a sandbox and on a budget.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from bitnet_inference.config import check_flag
from bitnet_inference.errors import FormatError, InvalidParams, Unsupported, said
from bitnet_inference.text.budget import Budget, OverBudget
from bitnet_inference.text.filter import Filters
from bitnet_inference.text.messages import (
    ROLES,
    Marks,
    Message,
    check_messages,
    check_objects,
    check_plain,
    strings_of,
    unread_arguments,
    with_short_ids,
)
from bitnet_inference.text.tokenizer import Tokenizer

MAX_SECONDS = 5.0
# Compiling is not on the budget. The longest templates that we know have half as much.
MAX_SOURCE_CHARS, MAX_TAGS = 1 << 16, 1 << 11
BASE_CHARS = 1 << 20
CHARS_PER_INPUT_CHAR = 64
_INSTEAD = {"tools": "leave them out, or force a call", "documents": "leave them out, or write them into a message"}
_PLAIN = "give a plain prompt (bitnet run --raw; of a server, ask for a text completion)"
_CURE = f"correct the template, or {_PLAIN}"


class Chat:
    """Turns conversations into prompts, with the chat template of a tokenizer.

    The template's mistakes are FormatErrors, its refusals of messages (raise_exception) InvalidParams. What is encoded
    passes the `filters`, which raise Filtered.
    """

    def __init__(self, tokenizer: Tokenizer, filters: Filters | None = None) -> None:
        self._tokenizer, self._filters = tokenizer, filters
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. `template` names one of several, `variables` are further ones that it may know."""
        inputs = _inputs(messages, tools, documents, variables)
        return self._render(inputs, template, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as ids, with a BOS in front. Special tokens in what the user wrote are plain text."""
        inputs = _inputs(messages, tools, documents, variables)
        if self._filters:
            _check(inputs, self._filters)
        marks = Marks(inputs, self._tokenizer.special)
        if not marks.needed:
            return self._tokenizer.encode_prompt(self._render(inputs, template, add_generation_prompt))
        text = self._render(marks.mark(inputs), template, add_generation_prompt)
        return self._tokenizer.encode_pieces(marks.split(text))

    def _render(self, inputs: dict[str, Any], name: str | None, add_generation_prompt: bool) -> str:
        check_flag("add_generation_prompt", add_generation_prompt)
        template = self._template(name, [option for option in _INSTEAD if inputs[option]])
        variables, messages = inputs.pop("variables"), inputs.pop("messages")
        if not template.knows_developer:  # OpenAI's newer name of the same role
            messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
        messages = with_short_ids(messages) if template.wants_short_ids else messages
        inputs |= {"messages": messages, "add_generation_prompt": add_generation_prompt, **variables}
        try:
            return template.render({**self._tokenizer.named, **inputs})
        except FormatError:
            if (place := unread_arguments(messages)) is None:
                raise
        cure = "correct it, or leave the call out"
        raise InvalidParams(f"{place} is no JSON object, which this model's chat template looks into: {cure}")

    def broken(self) -> list[str]:
        """What is wrong with each template that is none, a line each."""
        found = []
        for name in self._tokenizer.templates:
            try:
                self._template(name)
            except FormatError as error:
                found.append(str(error))
        return found

    def _template(self, name: str | None, given: Collection[str] = ()) -> Template:
        templates = self._tokenizer.templates
        if not templates:
            self._tokenizer.check_words()
            raise Unsupported(f"{self._tokenizer.path}: the model has no chat template: {_PLAIN}")
        if name is None:
            name = "tool_use" if "tools" in given and "tool_use" in templates else "default"
            for option in given:
                if option not in templates.get(name, option):
                    raise InvalidParams(f"{option}: this model's chat template knows none: {_INSTEAD[option]}")
        if name not in tuple(templates):  # what is no name may have no hash
            known = ", ".join(f"{each:.60}" for each in sorted(templates)[:20])
            raise InvalidParams(f"the model has no chat template {name!r:.60}: choose one of {known}")
        if name not in self._compiled:
            self._compiled[name] = Template(templates[name], f"{self._tokenizer.path}: chat template {name!r:.60}")
        return self._compiled[name]


def _inputs(messages: Any, tools: Any, documents: Any, variables: Any) -> dict[str, Any]:
    """All that comes from the caller, as plain values."""
    if variables is not None and not isinstance(variables, Mapping):
        raise InvalidParams("variables must be a mapping from names to JSON values")
    variables = check_plain("variables", {} if variables is None else dict(variables))
    if taken := {"messages", "tools", "documents", "add_generation_prompt"} & variables.keys():
        raise InvalidParams(f"variables: {min(taken)} is no free variable of a chat template: leave it out")
    return {
        "messages": check_messages(messages),
        "tools": check_objects("tools", tools),
        "documents": check_objects("documents", documents),
        "variables": variables,
    }


def _check(inputs: Mapping[str, Any], filters: Filters) -> None:
    """Have the filters look at everything but the usual names of roles, which nobody has written."""
    for index, message in enumerate(inputs["messages"]):
        for key, value in message.items():
            for text in strings_of(value) if key != "role" or value not in ROLES else ():
                filters.check(text, f"messages[{index}].{key}")
    for name in ("tools", "documents", "variables"):
        for text in strings_of(inputs[name]):
            filters.check(text, name)


class Template:
    """One compiled template; `name` goes before its errors. `knows_developer`: whether it speaks of that role."""

    def __init__(self, source: str, name: str, max_seconds: float = MAX_SECONDS) -> None:
        self._name = name
        self.knows_developer = "developer" in source
        self.wants_short_ids = "length != 9" in source  # of calls, as Mistral's
        self._max_seconds = max_seconds
        self._lock = threading.Lock()  # the environment holds one budget, so one rendering at a time
        self._environment = _Environment()
        if len(source) > MAX_SOURCE_CHARS:
            raise FormatError(name, "", f"{len(source)} characters, at most {MAX_SOURCE_CHARS} are read: {_CURE}")
        if (num_tags := source.count("{%") + source.count("{{")) > MAX_TAGS:
            raise FormatError(name, "", f"{num_tags} tags, at most {MAX_TAGS} are read: {_CURE}")
        with self._spending(Budget(max_seconds, BASE_CHARS)):
            self._template = self._environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the template. Raises FormatError, and InvalidParams where the template refuses its input."""
        unlimited = Budget(self._max_seconds, 1 << 62)
        budget = Budget(self._max_seconds, BASE_CHARS + CHARS_PER_INPUT_CHAR * unlimited.measure(variables))
        with self._lock, self._spending(budget):
            return "".join(budget.charge(piece) for piece in self._template.generate(variables))

    @contextmanager
    def _spending(self, budget: Budget) -> Iterator[None]:
        self._environment.budget = budget
        try:
            yield
        except _Refusal as error:
            raise InvalidParams(f"{self._name} refuses the messages: {said(error)}") from None
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(self._name, f"line {error.lineno}", f"broken template: {said(error)}: {_CURE}") from None
        except OverBudget as error:
            raise FormatError(self._name, "", f"refused, for {error}: {_CURE}") from None
        except Exception as error:  # a template can fail in every way that Python can
            raise FormatError(self._name, "", f"fails with {type(error).__name__}: {said(error)}: {_CURE}") from None


class _Refusal(jinja2.TemplateError):
    """Raised by a template itself, through raise_exception."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the budget's hooks, set as Transformers sets it."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    budget: Budget

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._printable)
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": self._strftime_now}
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}
        self.filters |= {"tojson": _tojson, "metered": lambda items: self.budget.metered(items)}
        self.filters |= {"charged": lambda value: value, "measured": self._printable, "concatenated": _concatenated}
        self.filters = {name: self._paid(name, function) for name, function in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def _printable(self, value: Any) -> Any:
        if not isinstance(value, (str, int, float)):
            self.budget.measure(value)
        return value

    def _strftime_now(self, format: str) -> str:
        self.budget.check_percent(format.replace("%", ""), ())
        return datetime.now().strftime(format)

    def concat(self, pieces: Iterable[str]) -> str:
        """Where macros and blocks put their text together."""
        pieces = list(pieces)
        self.budget.afford(sum(map(len, pieces)))
        text: str = self.budget.charge("".join(pieces))
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.check_operator(operator, left, right)
        return self.budget.charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.check_call(__obj, args, kwargs)
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = (budget.metered(args[0]), *args[1:])
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            budget.measure((args, kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        budget.measure(result)  # which may have one value in it several times, as what is in brackets may
        return budget.charge(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            self.budget.check_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return run

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, with its costs. Some filters get a context in front of their value."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            args = (*args[:skipped], self._settled(name, args[skipped]), *args[skipped + 1 :])
            self.budget.check_filter(name, args[skipped], args[skipped + 1 :], kwargs)
            return self.budget.charge(function(*args, **kwargs))

        return run

    def _settled(self, name: str, value: Any) -> Any:
        """Lazy values become lists before a filter that puts them together, so that they can be measured."""
        return list(self.budget.metered(value)) if isinstance(value, Iterator) and name != "metered" else value


class _Metering(NodeTransformer):
    """Puts the budget where Jinja has no hook: loops, `~`, slices, comparisons, and what is in brackets.

    That may have one value in it several times, and is measured: nothing that a template makes takes long to compare,
    to hash or to print.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "metered")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "concatenated")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "charged") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._measured(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return node if node.ctx == "store" else self._measured(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._measured(node, [each.value for each in node.items])

    def _measured(self, node: nodes.Expr, values: Sequence[nodes.Expr]) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(isinstance(each, nodes.Const) for each in values) else _filter(node, "charged")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "measured")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "measured")
        return node


def _filter(node: nodes.Node, name: str) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)
    return node if isinstance(node, nodes.Const) else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %}, by which training marks what the assistant says: prints what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to {% endgeneration %}."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """dict.fromkeys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace; names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _concatenated(values: list[Any]) -> str:
    return "".join(map(str, values))
