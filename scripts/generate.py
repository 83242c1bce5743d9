"""Generates with trained heads: python scripts/generate.py runs/quickstart --prompt "..."."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from selfdraft.heads.base import Head
from selfdraft.heads.errors import InputError, check_count, exit_code
from selfdraft.inference.settings import Settings
from selfdraft.inference.speculator import Speculator
from selfdraft.inference.statistics import Stats
from selfdraft.scripts import drafting
from selfdraft.scripts.bench import drafters_of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    drafting.add_options(cli)
    cli.add_argument("--prompt", help="text to answer; read from standard input when left out")
    cli.add_argument("--max-new-tokens", type=int, default=128)
    cli.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    cli.add_argument("--top-k", type=int, default=0)
    cli.add_argument("--top-p", type=float, default=1.0)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--no-chat", action="store_true", help="leave the chat template out")
    cli.add_argument(
        "--compare", action="store_true", help="also decode plainly; exit 1 if greedy differs"
    )
    return cli


def run(options: argparse.Namespace) -> int:
    """Prints the answer, as it comes unless plain decoding's is asked for too, and what it took."""
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    if not prompt.strip():
        raise InputError("the prompt is empty", 'Give --prompt "..." or text on standard input.')
    check_count("max_new_tokens", options.max_new_tokens)
    Settings(**_sampling(options))  # refuses before a target is loaded
    spec = drafting.load(options)
    if options.compare:
        return _compare(spec, prompt, options)
    stats = Stats()
    for piece in spec.stream(prompt, stats=stats, **_asked(options)):
        print(piece, end="", flush=True)
    _report(spec, stats)
    return 0


def _compare(spec: Speculator, prompt: str, options: argparse.Namespace) -> int:
    """Answers with the drafter and plainly, and tells whether the same ids came."""
    plain, asked = Speculator(spec.target), _asked(options)
    for one in (spec, plain):  # not counted: first calls allocate
        one.generate(prompt, **asked | {"max_new_tokens": 2})
    fast = spec.generate(prompt, **asked)
    print(fast.texts[0], end="")
    _report(spec, fast.stats)
    slow = plain.generate(prompt, **asked)
    print(_summary("plain", slow.stats))
    ratio = _rate(fast.stats) / _rate(slow.stats)
    print(f"speedup {ratio:.2f}x" + ("" if ratio >= 1 else ": slower than plain decoding"))
    if options.temperature > 0:
        print("sampled: both texts follow the target's law, so they need not be equal")
        return 0
    if fast.token_ids == slow.token_ids:
        print("identical")
        return 0
    # Texts alone may be equal: they leave special tokens out.
    text = spec.target.tokenizer.decode(slow.token_ids[0])
    print(f"DIFFERENT, plain decoding wrote:\n{text}")
    return 1


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    return _sampling(options) | {
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "chat": not options.no_chat,
    }


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "do_sample": options.temperature != 0,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
    }


def _report(spec: Speculator, stats: Stats) -> None:
    print(f"\n\n{_summary(spec.drafter.name, stats)}")
    for head in drafters_of(spec).values():
        if isinstance(head, Head):
            print(_about(head, stats))


def _about(head: Head, stats: Stats) -> str:
    """How far the head was trained, and whether it was of any use."""
    line = f"{head.kind} heads"
    if head.trained_length is not None:
        line += f", trained on rows of up to {head.trained_length} tokens"
    drafted, accepted = (
        counts.get(head.name, 0) for counts in (stats.drafted_by, stats.accepted_by)
    )
    if stats.rounds >= 50 and accepted < 0.02 * stats.rounds:
        line += (
            f": in {stats.rounds} rounds {accepted} of their {drafted} tokens were accepted, so "
            "they only cost time here; drafter ngram or none does without them"
        )
    return line


def _rate(stats: Stats) -> float:
    return stats.tokens / max(sum(stats.seconds.values()), 1e-9)


def _summary(name: str, stats: Stats) -> str:
    accepted = " ".join(f"{share:.2f}" for share in stats.acceptance_by_depth)
    depths = f", accepted by depth {accepted}" if accepted else ""
    if len(stats.accepted_by) > 1:
        depths += ", " + ", ".join(f"{n} tokens by {by}" for by, n in stats.accepted_by.items())
    return (
        f"{name}: {stats.tokens} tokens, {_rate(stats):.1f} tokens/s, "
        f"{stats.tokens_per_round:.2f} tokens a round (bonus included){depths}"
    )


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0, 1 (greedy differs) or 2 (bad input)."""
    options = parser().parse_args(argv)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
