import pytest

from tests.parallel.cases import TINY, write_chat, write_text
from tests.parallel.families import Family


@pytest.fixture(scope="module")
def family(pool, tmp_path_factory):
    """family(name, *extra flags): the reference of that data and those flags, run once."""
    folder = tmp_path_factory.mktemp("layouts")
    data = {
        "chat": ["--sft-data-path", write_chat(folder)],
        "text": ["--data-path", write_text(folder), "--split", "70,30,0"],
    }
    made = {}

    def get(kind, *extra):
        key = (kind, *extra)
        if key not in made:
            own = tmp_path_factory.mktemp("reference")
            made[key] = Family(pool, own, [*TINY, *data[kind], *(word for flags in extra for word in flags.split())])
        return made[key]

    return get
