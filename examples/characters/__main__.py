"""The whole demo: fonts, glyphs, training by torchrun, evaluation, report.

python -m examples.characters            # about five minutes on 2 cores, less with a filled cache
python -m examples.characters --smoke    # three small packages and seconds of training
"""

import os

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from . import fonts, glyphs, report
from .options import Options, num_cpus, parse
from .resume import check
from .terminal import Failure, guarded, phase, say
from .train import check_compiler


def main() -> None:
    """Runs the stages in order and shows what each took."""
    options = parse()
    check_compiler(options)
    check(options)
    times: dict[str, float] = {}
    with phase("fonts", times):
        where = fonts.folder(options)
        fonts.roles([design.name for design in fonts.designs_in(where)], options)
    with phase("glyphs", times):
        glyphs.main(options.to_argv())
    with phase("training", times):
        _train(options)
    with phase("evaluation and report", times):
        report.main(options.to_argv())
    spent = ", ".join(f"{title} {seconds:.0f} s" for title, seconds in times.items())
    say(f"{spent}; {sum(times.values()):.0f} s in all")


def _train(options: Options) -> None:
    """Trains on `--ranks` processes of this machine, by torchrun, which also ends them when this process is ended.

    Raises:
        Failure: a rank failed.
        KeyboardInterrupt: a signal ended the training; the same command goes on with it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus() // options.ranks)))  # or torchrun warns
    ranks = ["--standalone", "--nproc-per-node", str(options.ranks)]
    try:
        torchrun([*ranks, "-m", f"{__package__}.train", *options.to_argv()])
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        raise Failure(f"rank {rank} ended with status {first.exitcode}; its own message stands above") from None
    except SignalException:
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    guarded(main)
