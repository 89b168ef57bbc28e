"""Sets constants of the shipped profiles by published runs, and predicts every source by constants
that the others set.

    python -m bench.published_fit    # a minute; prints the constants, and the errors of each source

A share says how much of the rate of a data sheet is reached. Shares and the time of products in
float8 are fitted: those that make the mean of |log(predicted / measured)| smallest, where every
source counts as much as the root of the number of its runs. A
prediction is linear in the inverse of a share, nearly: it is made linear once, and the errors that
are reported are those of whole predictions.

Not fitted: NVLink 67 % and network 80 % of the data sheet, latency, launch, overlap, what a split
takes and the efficiency of attention on short documents, which are guesses; and Blackwell, whose ratios to
Hopper others have measured.
"""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from bench.published_runs import CAUSES, Case, cases
from longctx.planning.cost.work import RankWork
from longctx.planning.cost.work_overrides import Floats
from longctx.planning.hardware_profile import SHIPPED as PROFILES
from longctx.planning.hardware_profile import HardwareProfile
from longctx.training.described import read_described

ATTENTION = 3.5 * 2 * 32 * 32 * 128
"""Operations of attention, forward and backward, per token² of a causal document of the model that
profiles are for: half of 2 · 2 · heads · head size for each of 32 layers, 3.5 times."""


@dataclass(frozen=True)
class DataSheet:
    """Operations in bfloat16 and bytes of memory per second, and the family that shares belong
    to."""

    flops: float
    memory: float
    family: str


SHEETS = {
    "h100-nvlink-ib": DataSheet(989e12, 3.35e12, "hopper"),
    "h200-nvlink-ib": DataSheet(989e12, 4.8e12, "hopper"),
    "a100-80gb": DataSheet(312e12, 2.039e12, "ampere"),
    "a100-40gb": DataSheet(312e12, 1.555e12, "ampere"),
    "b200": DataSheet(2250e12, 8e12, "blackwell"),
    "h100-pcie": DataSheet(756e12, 2e12, "hopper"),
    "l40s": DataSheet(362e12, 0.864e12, "hopper"),
    "rtx-4090": DataSheet(165.2e12, 1.008e12, "hopper"),
    "mi300x": DataSheet(1307e12, 5.3e12, "cdna"),
}
"""An L40S and an RTX 4090 are taken to reach the shares of Hopper, which is a guess."""
UNSHIPPED = {"h100-hbm2e": DataSheet(912e12, 2.4e12, "hopper")}
"""Data sheets of GPUs that published runs had and no profile is for: torchtitan's H100s, which have
2.4 TB/s and a peak between those of SXM and NVL, 989 and 835 TFLOP/s, of which this is the middle
(its benchmarks/llama3_h100_202412_torchtitan.md)."""
LAUNCH_S = 0.05
"""Seconds of a micro-batch of 32 layers beside its tokens, a guess."""
BLACKWELL_PRODUCTS, BLACKWELL_ATTENTION = 1.67, 1.9
"""Rates of a B200, relative to an H200, in training an 8B: everything but attention, and attention
(FlashAttention 4 against 3), by the decomposition of ml-engineering at 744d01e."""
BLACKWELL_PEAK = 2250 / 989
CDNA = 668.4 / 1307 / (794.5 / 989)
"""Share of the peak that the fastest products reach on an MI300X, over that on an H100, by
ml-engineering at 744d01e. That attention loses as much is a guess."""


@dataclass(frozen=True)
class Constants:
    """What is fitted: shares of data sheets, and the time of products in float8."""

    products_hopper: float = 0.62
    products_ampere: float = 0.72
    attention_hopper: float = 0.53
    attention_ampere: float = 0.53
    memory: float = 0.8
    float8: float = 0.6

    def share(self, what: str, family: str) -> float:
        """Returns the share of products or attention."""
        if family == "blackwell":
            ratio = BLACKWELL_PRODUCTS if what == "products" else BLACKWELL_ATTENTION
            return self.share(what, "hopper") * ratio / BLACKWELL_PEAK
        if family == "cdna":
            return self.share(what, "hopper") * CDNA
        share: float = getattr(self, f"{what}_{family}")
        return share


SHIPPED = Constants(
    products_hopper=0.55,
    products_ampere=0.66,
    attention_hopper=0.53,
    attention_ampere=0.62,
    memory=0.75,
    float8=0.5,
)
"""The fitted constants, rounded, of the shipped profiles. `main` prints how far leaving out one
source moves each."""
BOUNDS = {
    "products_hopper": (0.4, 0.803),
    "products_ampere": (0.4, 0.869),
    "attention_hopper": (0.3, 0.75),
    "attention_ampere": (0.3, 0.75),
    "memory": (0.75, 0.95),
    "float8": (0.5, 1.0),
}
"""What constants may be. No product of ml-engineering's search for the fastest shapes at 744d01e
reached more of the peak; products in float8 have twice the peak."""
FITTED = (
    "linear_s_per_token",
    "attention_s_per_token2",
    "memory_bytes_per_s",
    "launch_s",
    "step_s",
    "query_share",
)
"""Constants of a profile that follow from `Constants`."""
STEPS = (0.3, 0.1, 0.03, 0.01, 0.003)
"""Factors that the search tries to change constants by."""


def profile_of(
    gpu: str, constants: Constants, known: RankWork, sheet: DataSheet | None = None
) -> HardwareProfile:
    """Returns the profile of a GPU by these constants, for the model that profiles describe and
    that does the work `known`. With `sheet`, its rates are of another data sheet."""
    if sheet is None:
        sheet = SHEETS[gpu]
    memory_bytes_per_s = constants.memory * sheet.memory
    profile = HardwareProfile.load(gpu)
    products = constants.share("products", sheet.family) * sheet.flops
    attention = constants.share("attention", sheet.family) * sheet.flops
    products_s = 6 * known.computed / products
    traffic_s = sum(known.traffic) / memory_bytes_per_s
    linear_s_per_token = products_s + traffic_s
    queries = known.queries / known.computed * products_s / linear_s_per_token
    return replace(
        profile,
        linear_s_per_token=linear_s_per_token,
        query_share=queries,
        attention_s_per_token2=ATTENTION / attention,
        memory_bytes_per_s=memory_bytes_per_s,
        launch_s=LAUNCH_S,
        step_s=0.0,
    )


def write_profiles(constants: Constants) -> None:
    """Writes the constants of all shipped profiles that are from data sheets."""
    for gpu in SHEETS:
        _, described = read_described(gpu)
        assert described is not None
        path = PROFILES / f"{gpu}.yaml"
        text = path.read_text("utf-8")
        for name, value in profile_of(gpu, constants, described.work).to_dict().items():
            if name in FITTED:
                line = f"{name}: {_number(value)}"
                text = re.sub(rf"^{name}: .*$", line, text, flags=re.MULTILINE)
        path.write_text(text, "utf-8")


def _number(value: float) -> str:
    """Returns a number of three digits that YAML 1.1 reads as one: with a decimal point."""
    digits, exponent, power = f"{value:.3g}".partition("e")
    return (digits if "." in digits else f"{digits}.0") + exponent + power


def predicted_s(case: Case, constants: Constants, causes: tuple[str, ...] = CAUSES) -> float:
    """Predicts the seconds of a step."""
    sheet = UNSHIPPED.get(case.run.other.get("sheet", ""))
    profile = profile_of(case.run.gpu, constants, case.described_work(causes), sheet)
    return case.seconds(profile, float8=constants.float8, causes=causes)


def errors(
    given: Sequence[Case], constants: Constants, causes: tuple[str, ...] = CAUSES
) -> list[float]:
    """Returns how far predictions are off: 0.1 where a step is predicted a tenth too long."""
    return [predicted_s(case, constants, causes) / case.measured_s - 1 for case in given]


class Fit:
    """Predictions of all runs, made linear around one set of constants, of which any part of the
    runs may set new ones."""

    def __init__(
        self, given: Sequence[Case], around: Constants, causes: tuple[str, ...] = CAUSES
    ) -> None:
        self.cases = given
        self.around = around
        self.causes = causes
        self.names = [field.name for field in fields(Constants)]
        self.measured = np.array([case.measured_s for case in given])
        self.base = self._predictions(around)
        changed = (replace(around, **{name: self._moved(name, 0.05)}) for name in self.names)
        columns = [(self._predictions(each) - self.base) / 0.05 for each in changed]
        self.slopes = np.stack(columns, axis=1)

    def _predictions(self, constants: Constants) -> Floats:
        return np.array([predicted_s(case, constants, self.causes) for case in self.cases])

    def _moved(self, name: str, longer: float) -> float:
        """Returns a constant whose work takes `longer` of its time more."""
        value: float = getattr(self.around, name)
        if name == "float8":
            return value * (1 + longer)
        return value / (1 + longer)

    def without(self, source: str | None) -> Constants:
        """Returns the constants that all runs but those of a source set."""
        used = np.array([case.run.source != source for case in self.cases])
        weights = used * self.weights()
        changes = np.zeros(len(self.names))
        best = self._loss(changes, weights)
        for step in STEPS:
            improved = True
            while improved:
                improved = False
                for place, name in enumerate(self.names):
                    for factor in (1 + step, 1 / (1 + step)):
                        tried = changes.copy()
                        tried[place] = (1 + changes[place]) * factor - 1
                        low, high = BOUNDS[name]
                        if not low <= self._moved(name, tried[place]) <= high:
                            continue
                        loss = self._loss(tried, weights)
                        if loss < best - 1e-9:
                            best, changes, improved = loss, tried, True
        found = zip(self.names, changes, strict=True)
        return Constants(**{name: float(self._moved(name, change)) for name, change in found})

    def weights(self) -> Floats:
        """Returns how much each run counts."""
        counts = Counter(case.run.source for case in self.cases)
        return np.array([counts[case.run.source] ** -0.5 for case in self.cases])

    def _loss(self, changes: Floats, weights: Floats) -> float:
        predicted = np.maximum(1e-3 * self.measured, self.base + self.slopes @ changes)
        return float(weights @ np.abs(np.log(predicted / self.measured)))


def fitted(given: Sequence[Case], causes: tuple[str, ...] = CAUSES) -> Fit:
    """Returns a fit around the constants that all runs set."""
    fit = Fit(given, Constants(), causes)
    return Fit(given, fit.without(None), causes)


def sources(given: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.run.source for case in given))


def unseen_errors(fit: Fit) -> dict[str, list[tuple[Case, float]]]:
    """Returns the runs of each source with their errors, predicted by constants that the other
    sources set."""
    found = {}
    for source in sources(fit.cases):
        own = [case for case in fit.cases if case.run.source == source]
        off = errors(own, fit.without(source), fit.causes)
        found[source] = list(zip(own, off, strict=True))
    return found


def median(off: Sequence[float]) -> float:
    return statistics.median(abs(each) for each in off)


def ninetieth(off: Sequence[float]) -> float:
    return float(np.quantile(np.abs(off), 0.9))


def of_kind(rows: Sequence[tuple[Case, float]], *, float8: bool) -> list[float]:
    """Returns the errors of runs with products in float8, or of those without."""
    return [error for case, error in rows if ("float8" in case.run.other) == float8]


def mean_error(fit: Fit, constants: Constants) -> float:
    """Returns what a fit makes smallest, of whole predictions."""
    weights = fit.weights()
    logarithms = np.abs(np.log1p(errors(fit.cases, constants, fit.causes)))
    return float(weights @ logarithms / weights.sum())


def main() -> None:
    fit = fitted(cases())
    found = fit.without(None)
    held_out = [fit.without(source) for source in sources(fit.cases)]
    for name, value in asdict(found).items():
        values = [getattr(each, name) for each in held_out]
        between = f"{min(values):.3f} to {max(values):.3f} without a source"
        print(f"{name:20} {value:.4f} ({between}), shipped {getattr(SHIPPED, name)}")
    for name, constants in (("fitted", found), ("shipped", SHIPPED)):
        print(f"mean error of {name} constants {mean_error(fit, constants):.4f}")
    for source, rows in unseen_errors(fit).items():
        for float8 in (False, True):
            off = of_kind(rows, float8=float8)
            if off:
                kind = "float8" if float8 else "bfloat16"
                print(f"{source:16} {kind:8} {len(off):3} {median(off):.0%} {ninetieth(off):.0%}")
    write_profiles(SHIPPED)


if __name__ == "__main__":
    main()
