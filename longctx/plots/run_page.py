"""Page of training runs: one HTML file with the table and the figure of one or several runs."""

from collections.abc import Mapping, Sequence

from longctx.plots.charts import svg_uri
from longctx.plots.page import facts, figure, numbers, page
from longctx.plots.run_log import PAUSED, RunLog, summary
from longctx.plots.runs import draw_runs

SUMMARY_WORDS = (
    "tokens/s, step time, measured / predicted: medians; shares: of the mean step time. All of these leave out the first step, "
    f"which also compiles, and pauses: steps that took {PAUSED} times as long as usual, compared with their prediction."
)
CAPTION = (
    "Loss: training loss of every step, of a long run as a pale line below its running mean; circles: validation loss. "
    "Of runs on rollouts: means over rollouts or tokens, where they are known. "
    "Measured against predicted time: one point per step, without the first step and pauses. On the dashed line the prediction "
    "was exact; above the line the step took longer. Points along another straight line through zero mean that all predictions "
    "are off by one factor, which does not change which plan is best; scattered points mean that the cost model misses "
    "something. Parts of the step time: means over steps and ranks. Exchange wait: waiting for K and V or their gradients. "
    "Rest: matrix products, loss, sharding and waiting for other ranks. Degrees: the height of a band is the number of "
    "documents of a step in that class, on a logarithmic scale that all bands share; the number on the right is its mean."
)


def render(runs: Sequence[RunLog], about: Mapping[str, str]) -> str:
    """Returns the page as HTML text. `about` holds facts such as the command: name → value."""
    title = f"Training run{'s' * (len(runs) > 1)}"
    return page(
        f"{title} {', '.join(run.name for run in runs)}",
        [
            f"<h1>{title}</h1>",
            facts({**{f"run {run.name}": run.path.resolve() for run in runs}, **about}),
            numbers(*summary(runs)),
            f"<p class=caption>{SUMMARY_WORDS}</p>",
            figure(svg_uri(draw_runs(runs)), "Steps", CAPTION),
        ],
    )
