"""The claims of the README: the tests that stand for each here, and what only a GPU can say.

`python -m tools.pages` writes docs/evidence/claims.md; tests/project/test_claims.py fails if a line
of the README has no claim of this list, or a test does not exist.
"""

from typing import NamedTuple


class Claim(NamedTuple):
    """A claim in the README's own words, without figures that benchmarks write there.

    Attributes:
        tests: `folder/file::function` under tests/, or `folder/file`.
        gpu: what only a GPU can say, and where: a part of `bench/first_contact.py`; empty: nothing.
    """

    said: str
    tests: tuple[str, ...]
    gpu: str = ""


FIGURES = "project/test_docs.py::test_figures_are_those_of_the_benchmarks"
OF_PAGES = "project/test_docs.py::test_figures_of_the_readme_are_those_of_its_pages"
PARITY = "training/test_parity.py::test_same_as_one_plain_process"
FLOAT64 = "attention/test_attention.py::test_equals_dense_float64"
MESSAGES = "attention/test_messages_of_64_ranks.py::test_64_ranks_end"
SEVERAL = "bench/test_several_gpus.py::test_two_processes_measure_every_claim"
GAIN = "the gain on several GPUs (`several`)"
LARGE = "the gain on 64 GPUs, which nothing here measures"

CLAIMS = (
    Claim(
        "Whatever the plan, loss and gradients equal those of one process",
        (PARITY, FLOAT64, MESSAGES, "attention/test_two_devices.py"),
        "kernels of GPUs against float64 (`attention`); NCCL (`messages`, `several`)",
    ),
    Claim(
        "longctx has not run on GPUs yet",
        ("bench/test_first_contact.py::test_dry_run",),
        "everything in this column",
    ),
    Claim(
        "a document of 90k tokens takes 16 ranks",
        (
            "comparison/test_pictures.py::test_readme_says_what_the_timeline_shows",
            "comparison/test_pictures.py::test_the_timeline_is_what_the_command_draws",
        ),
        LARGE,
    ),
    Claim(
        "8B model, 64 H100s, 1.0M tokens per step",
        (FIGURES, "comparison/test_compare.py::test_gains_are_those_of_the_readme_in_its_order"),
        "the constants of a GPU (`profile`)",
    ),
    Claim(
        "a static run on its own best tensor and pipeline split",
        (
            FIGURES,
            "comparison/test_split.py::test_the_best_splits_are_those_of_planning_every_split",
        ),
        LARGE,
    ),
    Claim(
        "64 data-parallel ranks at the best single context-parallel degree",
        (FIGURES, "comparison/test_compare.py::test_the_best_single_degree_is_that_of_all_steps"),
        LARGE,
    ),
    Claim(
        "64 data-parallel ranks at the smallest degree that holds every document",
        (
            FIGURES,
            "comparison/test_compare.py::"
            "test_fixed_static_has_the_degree_of_its_data_set_or_the_given_one",
        ),
        LARGE,
    ),
    Claim(
        "with published",
        ("comparison/test_mixes.py::test_histograms_are_those_published",),
    ),
    Claim(
        "8B model, 8 H100s, 1.0M tokens per step",
        (FIGURES, "bench/test_bench_against.py::test_rows_are_those_of_the_settings"),
        "the constants of a GPU (`profile`)",
    ),
    Claim(
        "over TRL's packing, FSDP2",
        (FIGURES, "trainers/test_against_trl.py", SEVERAL),
        GAIN,
    ),
    Claim(
        "over whole documents, balanced over ranks",
        (FIGURES, "bench/test_bench_against.py::test_rows_are_those_of_the_settings"),
        "the gain on 8 GPUs, which nothing here measures",
    ),
    Claim(
        "over the best single context-parallel degree",
        (FIGURES, "comparison/test_compare.py::test_the_best_single_degree_is_that_of_all_steps"),
        GAIN,
    ),
    Claim(
        "A rank of TRL has to hold its row",
        (OF_PAGES, "trainers/test_against_trl.py"),
        "memory against its estimate (`training`)",
    ),
    Claim(
        "packing with prompts computed once makes a step of DPO",
        (FIGURES, "trainers/test_trainers.py::test_trainers_that_need_sequences"),
        "the same with kernels of GPUs",
    ),
    Claim("sampling, 5.1 times", (FIGURES,), "the same with kernels of GPUs"),
    Claim(
        "also ran on 32 processes that plan and",
        (FIGURES, "project/test_docs.py::test_every_emulated_run_in_the_results_is_shown"),
        LARGE,
    ),
    Claim("sleep instead of computing", (FIGURES,), LARGE),
    Claim(
        "one call does it",
        (
            "trainers/test_trainers.py::test_trainer_computes_what_one_plain_process_computes",
            "trainers/test_trainer_examples.py::test_it_runs_as_it_is_printed",
        ),
        "speed in a trainer (`several`)",
    ),
    Claim(
        "names what is wrong with the packing, padding, accumulation or context parallelism",
        (
            "check/test_check_step.py::test_faults_are_named_and_right_steps_are_right",
            "check/test_check_hidden.py::test_a_fault_is_named",
        ),
    ),
    Claim(
        "It found faults in Axolotl, LLaMA-Factory and transformers",
        ("check/test_check_loops.py::test_a_template_is_right_and_its_fault_is_named",),
    ),
    Claim(
        "results have to be exact at any split",
        (PARITY, "training/test_parity.py::test_every_option_is_tried"),
        "as for the first claim",
    ),
    Claim(
        "`plan` shows one step of an 8B model on 8 H100s",
        ("project/test_docs.py::test_the_tour_of_the_readme",),
    ),
    Claim(
        "`train` trains a small model on two processes",
        ("project/test_docs.py::test_the_tour_of_the_readme",),
    ),
    Claim("Each step prints one line", ("project/test_outputs.py::test_lines_of_a_run",)),
    Claim(
        "some documents stayed whole on a rank, others were split over 2",
        ("project/test_docs.py::test_the_tour_of_the_readme",),
        "the constants of a GPU (`profile`)",
    ),
    Claim(
        "continues, on any number of processes",
        (
            "training/test_continue.py::test_a_run_resumes_from_any_step_on_any_number_of_ranks",
            "training/test_kills.py::test_killed_runs_end_as_if_nobody_had_disturbed_them",
        ),
        "a checkpoint of two GPUs (`messages`)",
    ),
    Claim(
        "causal and 23 encoder [model](docs/families.md) [types](docs/encoders.md) that are exact",
        (
            "project/test_docs.py::test_numbers_of_exact_models_are_those_of_their_pages",
            "hf/test_huggingface_families.py",
            "hf/test_encoder_families.py::test_every_encoder_is_exact_or_refused",
        ),
        "their kernels on GPUs, which nothing here measures",
    ),
)

NO_CLAIM = (
    "**You have**",
    "| 8B model, 64 H100s",
    "Inside [the trainer",
    "Linux (macOS",
    "longctx is on no package registry",
    "(`pip install torch",
    "Put text files",
    "- **",
    "`make docs`",
)
"""How lines begin that say where things are, or what to install."""


def page() -> list[str]:
    """Returns the lines of the page."""
    lines = [
        "# Claims of the README",
        "",
        "**Claim.** Tests on CPUs stand for every claim of the README; what only a GPU can say is "
        "measured by a part of [first contact](../gpu.md#first-contact), once one runs it.",
        "",
        "| claim | tests | only a GPU can say |",
        "|---|---|---|",
    ]
    for claim in CLAIMS:
        tests = ", ".join(f"`{test}`" for test in claim.tests)
        said = claim.said.replace("](docs/", "](../")
        lines.append(f"| {said} | {tests} | {claim.gpu} |")
    return lines
