"""Picture: in which targets of each document a weight is wrong."""

from .facts import Facts


def picture(facts: Facts) -> list[str]:
    """Returns a line for each document with a wrong weight; of its targets `.` are right, `0` lost,
    `+` and `-` off."""
    if facts.record.weights_apart or facts.record.changed_at:
        return []
    if not facts.fit.exact or not (
        facts.lost or facts.extra or (facts.kept and not facts.even(facts.kept.values()))
    ):
        return []
    lines = list[str]()
    for document in facts.documents:
        signs = ""
        for number in facts.tokens.of(document)[:-1]:
            pair = (number, facts.tokens.ids[number + 1])
            weight = facts.relative.get(pair, 0.0)
            wanted = float(pair in facts.wanted)
            if pair in facts.lost:
                signs += "0"
            else:
                signs += _sign(weight, wanted, same=facts.limits.weights)
        if len(signs) > 96:
            signs = signs[:96] + "…"
        if signs.strip(".…"):
            lines.append(f"document {document:2} {signs}")
    return lines


def _sign(weight: float, wanted: float, *, same: float) -> str:
    """Returns how a weight relates to the one that it should be."""
    if abs(weight - wanted) < same:
        return "."
    if weight > wanted:
        return "+"
    return "-"
