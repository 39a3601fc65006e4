"""A case of the pool that writes features of a target instead of training."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))


def write(case: dict, store) -> dict:
    """stop_after: so many micro-batches, each of which is synced; nothing more is then written, as after a kill.
    unusable: so the target turns out to be when it is built."""
    import cache_features

    from megatron_dllm.models.targets import caching
    from megatron_dllm.models.targets import store as files

    sys.argv = ["cache_features.py", *case["flags"]]
    run, ran, files._SYNC_BYTES = caching._run, [], 1
    build = caching.targets.build

    def counted(*args):
        if len(ran) == case.get("stop_after"):
            raise KeyboardInterrupt
        ran.append(args)
        return run(*args)

    def unusable(*_):
        raise caching.targets.UnusableTarget("it cannot be used: use another.")

    caching._run, caching.targets.build = counted, unusable if case.get("unusable") else build
    try:
        cache_features.run(store)
    except KeyboardInterrupt:
        pass
    finally:
        caching._run, caching.targets.build = run, build
    return dict(ran=len(ran))
