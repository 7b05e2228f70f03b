"""What an expression of Prometheus asks for, and what its result is labelled with."""

import re
from collections.abc import Iterator

import promql_parser as promql

# What Prometheus puts on every series of a pod.
TARGET = {"namespace", "pod"}
# Made by Prometheus itself.
OWN = {"up"}


def nodes(expression: promql.Expr) -> Iterator[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(expression, found.append)
    return iter(found)


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    return [node for node in nodes(expression) if isinstance(node, promql.VectorSelector)]


def result_labels(node: promql.Expr) -> set[str]:
    """Of an expression that says by what it sums up."""
    if isinstance(node, promql.AggregateExpr):
        assert node.modifier is not None, node.prettify()
        assert node.modifier.type == promql.AggModifierType.By
        return set(node.modifier.labels)
    if isinstance(node, promql.BinaryExpr):
        return result_labels(node.lhs if selectors(node.lhs) else node.rhs)
    if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
        return result_labels(node.args[1]) - {"le"}
    if isinstance(node, promql.ParenExpr):
        return result_labels(node.expr)
    raise AssertionError(f"labels of {node.prettify()} are not known")


def made_labels(expression: promql.Expr) -> set[str]:
    """By label_replace."""
    calls = [node for node in nodes(expression) if isinstance(node, promql.Call)]
    return {each.args[1].val for each in calls if each.func.name == "label_replace"}


def check(text: str, pages: dict[str, dict[str, list[dict[str, str]]]]) -> promql.Expr:
    """Every series and label is on a page of the pods that it is asked of; `pages` by pod."""
    expression = promql.parse(text)
    known = set(TARGET) | made_labels(expression)
    for selector in selectors(expression):
        asked = {matcher.name: matcher for matcher in selector.matchers.matchers}
        assert asked["namespace"].value == "messages"
        pods = [pod for pod in pages if re.fullmatch(asked["pod"].value, pod)]
        assert pods, f"{asked['pod'].value} are no pods"
        if selector.name in OWN:
            continue
        series = [one for pod in pods for one in pages[pod].get(selector.name, ())]
        assert series, f"no {selector.name} on the pages of {pods}"
        known |= set(series[0])
        for name in asked.keys() - TARGET:
            values = {one[name] for one in series}
            if asked[name].op == promql.MatchOp.Equal:
                assert asked[name].value in values, f"no {name}={asked[name].value}: {values}"
    for node in nodes(expression):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= known, node.prettify()
    return expression
