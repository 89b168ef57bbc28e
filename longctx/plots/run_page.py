"""Page of training runs: one HTML file with a table and figures of one or several runs."""

from collections.abc import Mapping, Sequence

from longctx.plots import runs as charts
from longctx.plots.page import facts, figure, numbers, page
from longctx.plots.run_log import PAUSED, Run, summary

SUMMARY_WORDS = (
    "tokens/s, step time, measured / predicted: medians; shares: of the mean step time. All of these leave out the first step, "
    f"which also compiles, and pauses: steps that took {PAUSED} times as long as usual, compared with their prediction."
)


def render(runs: Sequence[Run], about: Mapping[str, str]) -> str:
    """Returns the page as HTML text. `about` holds facts such as the command: name → value."""
    names = ", ".join(run.name for run in runs)
    title = f"Training run {names}" if len(runs) == 1 else f"Training runs {names}"
    return page(
        title,
        [
            f"<h1>Training run{'s' * (len(runs) > 1)}</h1>",
            facts({**{f"run {run.name}": run.path.resolve() for run in runs}, **about}),
            numbers(*summary(runs)),
            f"<p class=caption>{SUMMARY_WORDS}</p>",
            figure(
                charts.chart_uri(charts.draw_loss, runs),
                "Loss",
                "Training loss of every step; of a long run as a pale line below its running mean. Circles: loss on held-out "
                "documents, where the run validates.",
            ),
            figure(charts.chart_uri(charts.draw_speed, runs), "Speed", "Tokens per second over all ranks."),
            figure(
                charts.chart_uri(charts.draw_predicted, runs),
                "Measured against predicted time",
                "One point per step, without the first step and pauses. On the dashed line the prediction was exact; above the "
                "line the step took longer. Points along another straight line through zero mean that all predictions are off "
                "by one factor, which does not change which plan is best; scattered points mean that the cost model misses "
                "something.",
            ),
            figure(
                charts.chart_uri(charts.draw_split, runs),
                "Time split",
                "Mean over steps and ranks, without the first step and pauses. Exchange wait: waiting for K and V or their "
                "gradients. Rest: matrix products, loss, sharding and waiting for other ranks.",
            ),
            "<h2>Degrees</h2>",
            *(
                figure(
                    charts.degrees_uri(run),
                    f"Documents per step by degree: {run.name}",
                    "One band per degree class. The height of a band is the number of documents of a step, on a logarithmic "
                    "scale that all bands share; the number on the right is its mean.",
                )
                for run in runs
            ),
        ],
    )
