"""What a plan looks like: tables for people, JSON for programs."""

import shlex
from dataclasses import asdict

from megatron_dllm.planning.flops import training_flops
from megatron_dllm.planning.hardware import Gpu
from megatron_dllm.planning.memory import worst
from megatron_dllm.planning.search import Plan

GIB = 2**30
HEADER = "layout | micro-batch | recompute | GiB a GPU | step s | tokens/s | TFLOP/s | MFU".split(" | ")


def row(plan: Plan) -> list[str]:
    """Cells of HEADER."""
    p = plan.prediction
    return [
        plan.name,
        str(plan.layout.micro_batch),
        plan.recompute,
        f"{plan.memory.total / GIB:.1f}",
        f"{p.step:.2f}",
        f"{p.tokens_per_second:,.0f}",
        f"{p.tflops(plan.layout.ranks):.0f}",
        f"{p.mfu:.1%}",
    ]


def table(header: list[str], rows: list[list[str]], markdown: bool = False) -> str:
    """Columns of equal width; the first one to the left."""
    if markdown:
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    align = lambda line: "  ".join(
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "\n".join(align(line).rstrip() for line in [header, *rows])


def describe_work(plan: Plan) -> str:
    """The model and what a data token of this mode costs."""
    net, rows, args = plan.network, plan.rows, plan.args
    flops = training_flops(net, rows, args)
    total = sum(flops.values())
    dense = rows.queries * rows.processed
    lines = [
        f"{net.count.all.total / 1e9:.3f} G parameters"
        + (f", {net.active / 1e9:.3f} G of them met by a token" if any(layer.experts for layer in net.layers) else "")
        + (f"; its target {net.target.count.all.total / 1e9:.3f} G, frozen" if net.target else "")
        + (f", {net.count.trained.total / 1e6:.2f} M of them trained, in adapters" if net.adapters else ""),
        f"A sample of {rows.data:.0f} data tokens is {rows.processed:.0f} rows of the network's input"
        + "".join(f", {count:.0f} scored for {name}" for name, count in rows.scored.items())
        + f"; attention sees {rows.pairs['rule'] / dense:.1%} of all pairs.",
        f"{total / rows.data / 1e9:.2f} GFLOP a data token, forward and backward: "
        + ", ".join(
            f"{name} {value / total:.1%}" for name, value in sorted(flops.items(), key=lambda x: -x[1]) if value
        ),
    ]
    return "\n".join(lines)


def describe_memory(plan: Plan, gpu: Gpu) -> str:
    """By part, of the pipeline stages that differ most."""
    place, memory = worst(list(plan.memories))
    stages = sorted({0, place, len(plan.memories) - 1})
    header = ["GiB", *(f"stage {stage}" if len(plan.memories) > 1 else "a rank" for stage in stages)]
    rows = [[part, *(f"{plan.memories[stage].parts[part] / GIB:.2f}" for stage in stages)] for part in memory.parts]
    rows.append(["total", *(f"{plan.memories[stage].total / GIB:.2f}" for stage in stages)])
    rows.append([f"of {gpu.name}", *(f"{gpu.memory / GIB:.2f}" for _ in stages)])
    return table(header, rows)


def describe_time(plan: Plan) -> str:
    """Of a step, by part."""
    parts = sorted(plan.prediction.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts if seconds >= 0.005 * plan.prediction.step)


def command(plan: Plan, words: list[str], gpus: int, node: int) -> str:
    """To be run in the repository's root. words: flags beside the plan's own; $NAMES stay for the shell."""
    launch = ["torchrun", "--nproc-per-node", str(min(gpus, node))]
    if gpus > node:
        launch += ["--nnodes", str(gpus // node), "--node-rank", "$NODE_RANK", "--master-addr", "$MASTER_ADDR"]
    quoted = (f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in [*words, *plan.flags])
    lines, line = [], " ".join(f'"{word}"' if word.startswith("$") else word for word in [*launch, "pretrain_dllm.py"])
    for word in quoted:
        if word.startswith("--") and len(line) > 90:
            lines.append(line)
            line = "  " + word
        else:
            line += " " + word
    return " \\\n".join([*lines, line])


def as_json(plan: Plan, gpu: Gpu, line: str) -> dict:
    """Bytes, seconds, FLOPs."""
    flops = training_flops(plan.network, plan.rows, plan.args)
    return dict(
        layout=plan.name,
        flags=list(plan.flags),
        command=line,
        fits=plan.memory.total <= gpu.memory,
        memory_bytes=[memory.parts for memory in plan.memories],
        gpu_memory_bytes=gpu.memory,
        parameters=plan.network.count.all.total,
        trained_parameters=plan.network.count.trained.total,
        rows=asdict(plan.rows),
        flops_per_data_token={name: value / plan.rows.data for name, value in flops.items()},
        step_seconds=plan.prediction.step,
        step_parts_seconds=plan.prediction.parts,
        tokens_per_second=plan.prediction.tokens_per_second,
        tflops_per_gpu=plan.prediction.tflops(plan.layout.ranks),
        mfu=plan.prediction.mfu,
    )
