"""Predict steps of Llama 3 8B, 70B and 405B on 8 to 4096 GPUs and write them to docs/scaling.md.

    python scripts/predict.py [--cost-model FILE.toml] [--print]

Traces rank 0 of every layout on fake tensors and a fake process group, and simulates each schedule on the cost model:
without --cost-model that of H100s in torchtitan_simplefsdp/graph/machines.py. Deterministic; about one minute on one
core. --print leaves the document alone.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: fake tensors are on CPU, also on a machine with GPUs
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package

from torchtitan.tools.logging import logger

from torchtitan_simplefsdp.graph.cost_model import CostModel, load_cost_model
from torchtitan_simplefsdp.graph.machines import get_compiled_seconds, H100
from torchtitan_simplefsdp.graph.schedules import AUTO, predict, predict_auto, Prediction, SCHEDULES
from torchtitan_simplefsdp.graph.segments import build_step
from torchtitan_simplefsdp.graph.traffic import get_minimum_bytes
from torchtitan_simplefsdp.titan.traced_llama import LAYER, Layout, trace_llama, TracedLlama

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
PICTURE = DOCUMENT.parent / "scaling" / "exposed.png"
START, END = "<!-- predictions: python scripts/predict.py -->\n", "<!-- end of predictions -->"
AUTO_MEMORY = 2  # auto buckets may hold this many times what block buckets with prefetch hold


class Case(NamedTuple):
    """Rows of the table: a layout, and whether parameters are freed after forward (nothing to free in `replicate`)."""

    layout: Layout
    reshard: bool

    @property
    def mode(self) -> str:
        name = {(True, True): "hybrid_shard", (True, False): "replicate"}.get(
            (self.layout.replicate > 1, self.layout.shard > 1), "fully_shard"
        )
        return f"{name}{', reshard' if self.reshard else ''}"


def build_cases() -> list[Case]:
    """Return the layouts of the tables: full activation checkpointing and TP 8 where a model needs them."""
    cases = []
    for ranks in (8, 64, 512, 4096):
        cases += [Case(Layout("8B", shard=ranks), reshard) for reshard in (True, False)]
        cases.append(Case(Layout("8B", replicate=ranks), False))
        if ranks > 8:
            cases.append(Case(Layout("8B", replicate=ranks // 8, shard=8), True))
    for flavor, fewest in (("70B", 64), ("405B", 512)):
        for ranks in (64, 512, 4096):
            if ranks < fewest:
                continue
            fsdp = ranks // 8
            cases.append(Case(Layout(flavor, shard=fsdp, tp=8, checkpoint="full"), True))
            cases.append(Case(Layout(flavor, shard=fsdp, tp=8, checkpoint="full"), False))
            if fsdp > fewest // 8:
                cases.append(
                    Case(Layout(flavor, replicate=ranks // fewest, shard=fewest // 8, tp=8, checkpoint="full"), True)
                )
    return cases


# torchtitan benchmarks/llama3_h100_202412_torchtitan.md: tokens/s per GPU and what the row was used for.
_8B_ON_8, _8B_ON_128 = Layout("8B", shard=8, local_batch=2), Layout("8B", shard=128, local_batch=2)
PUBLISHED = (
    (_8B_ON_8, False, 5762, "calibrates the FLOP rate"),
    (_8B_ON_8, True, 6667, "calibrates the traffic of fused ops"),
    (_8B_ON_128, False, 5605, "predicted"),
    (_8B_ON_128, True, 6514, "predicted"),
    (
        Layout("70B", shard=32, tp=8, local_batch=16, checkpoint="full"),
        True,
        829,
        "predicted in bf16; published with Float8, so not like for like",
    ),
)


def predict_all(traced: TracedLlama, cost: CostModel, reshard: bool, compiled: bool = False) -> dict[str, Prediction]:
    """Return a prediction per schedule; the one with automatic buckets last."""
    seconds = get_compiled_seconds if compiled else None
    step = build_step(traced.events, cost, ("dp_replicate", "fsdp"), {LAYER: traced.layers}, seconds)
    predictions = {name: predict(step, cost, schedule, reshard) for name, schedule in SCHEDULES.items()}
    most_bytes = AUTO_MEMORY * list(predictions.values())[-1].timeline.peak_bytes
    return predictions | {AUTO: predict_auto(step, cost, reshard, most_bytes)}


def build_table(cost: CostModel, cases: list[Case], traces: dict[Layout, TracedLlama]) -> tuple[list[str], dict]:
    """Return the table's lines and the predictions by case."""
    lines = [
        "| model | GPUs | mode | GB sent per rank (of minimum) | step without communication |",
        "|---|---|---|---|---|",
    ]
    names = [*SCHEDULES, AUTO]
    lines = [f"{line} {' | '.join(cells)} |" for line, cells in zip(lines, (names, ["---"] * len(names)))]
    predictions = {}
    for case in cases:
        layout, traced = case.layout, traces[case.layout]
        predictions[case] = all_of_case = predict_all(traced, cost, case.reshard)
        sent = next(iter(all_of_case.values())).wire_bytes
        least = get_minimum_bytes(traced.tp_local_parameters, 2, 4, layout.shard, layout.replicate, case.reshard)
        compute = next(iter(all_of_case.values())).timeline.compute_seconds
        cells = [
            f"{p.timeline.exposed_seconds * 1e3:,.0f} ms, {p.timeline.peak_bytes / 1e9:.1f} GB"
            for p in all_of_case.values()
        ]
        bucket = all_of_case[AUTO].bucket
        cells[-1] += f" ({bucket if bucket == 'block' else f'{bucket // 2**20} MiB'})"
        degrees = (
            f"{case.mode} {layout.replicate} x {layout.shard}" if layout.replicate > 1 < layout.shard else case.mode
        )
        tp = f", TP {layout.tp}" if layout.tp > 1 else ""
        lines.append(
            f"| {layout.flavor} | {layout.ranks} | {degrees}{tp} | {sent / 1e9:.2f} ({sent / least:.3f}) | "
            f"{compute * 1e3:,.0f} ms | {' | '.join(cells)} |"
        )
    return lines, predictions


def build_published(cost: CostModel, traces: dict[Layout, TracedLlama]) -> list[str]:
    """Return a table of predictions against published figures."""
    lines = ["| run | published, tokens/s per GPU | predicted | difference | this row |", "|---|---|---|---|---|"]
    for layout, compiled, published, used in PUBLISHED:
        predictions = predict_all(traces[layout], cost, reshard=True, compiled=compiled)
        step = predictions["block buckets, prefetch"].timeline.step_seconds
        predicted = layout.local_batch * layout.seq_len / step / layout.tp
        tp = f", TP {layout.tp}" if layout.tp > 1 else ""
        run = f"{layout.flavor}, {layout.ranks} GPUs{tp}{', compiled' if compiled else ''}"
        lines.append(f"| {run} | {published:,} | {predicted:,.0f} | {predicted / published - 1:+.1%} | {used} |")
    return lines


def plot(predictions: dict[Case, dict[str, Prediction]]) -> None:
    """Draw the share of the step that is exposed communication, for sharded modes over ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    flavors = list(dict.fromkeys(case.layout.flavor for case in predictions))
    for axes, flavor in zip(figure.subplots(1, len(flavors), sharey=True), flavors):
        cases = [c for c in predictions if c.layout.flavor == flavor and c.mode == "fully_shard, reshard"]
        for name in predictions[cases[0]]:
            timelines = [predictions[case][name].timeline for case in cases]
            axes.plot(
                [c.layout.ranks for c in cases],
                [100 * t.exposed_seconds / t.step_seconds for t in timelines],
                "o-",
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_title(f"llama3 {flavor}, fully_shard with reshard")
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("exposed communication, % of the step")
    figure.axes[0].legend()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost-model", type=Path, metavar="FILE", help="TOML of another machine; implies --print")
    parser.add_argument("--print", action="store_true", help="only print the tables")
    args = parser.parse_args()
    cost = load_cost_model(args.cost_model) if args.cost_model else H100
    logger.setLevel(logging.WARNING)
    cases = build_cases()
    layouts = dict.fromkeys([*(case.layout for case in cases), *(row[0] for row in PUBLISHED if not args.cost_model)])
    traces = {layout: trace_llama(layout) for layout in layouts}
    table, predictions = build_table(cost, cases, traces)
    parts = [f"Machine: {cost.name}.", "\n".join(table)]
    if not args.cost_model:
        parts.append("\n".join(build_published(cost, traces)))
    print("\n\n".join(parts))
    if not args.cost_model and not args.print:
        plot(predictions)
        before, _, rest = DOCUMENT.read_text().partition(START)
        picture = f"![exposed communication]({PICTURE.parent.name}/{PICTURE.name})"
        DOCUMENT.write_text(before + START + "\n\n".join([*parts, picture]) + "\n" + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
