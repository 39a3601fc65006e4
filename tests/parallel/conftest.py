import pytest

from tests.hf_models import make
from tests.parallel.cases import TINY, write_chat, write_text
from tests.parallel.converter import Converter
from tests.parallel.families import Family
from tests.parallel.hf import TRAIN, write_words


@pytest.fixture(scope="module")
def family(pool, tmp_path_factory):
    """family(kind, *extra flags, steps=2): the reference of that data and those flags, run once."""
    folder = tmp_path_factory.mktemp("layouts")
    data = {
        "chat": ["--sft-data-path", write_chat(folder)],
        "text": ["--data-path", write_text(folder), "--split", "70,30,0"],
    }
    made = {}

    def get(kind, *extra, steps=2):
        key = (kind, steps, *extra)
        if key not in made:
            argv = [*TINY, *data[kind], *(word for flags in extra for word in flags.split())]
            made[key] = Family(pool, tmp_path_factory.mktemp("reference"), argv, steps)
        return made[key]

    return get


@pytest.fixture(scope="session")
def converter():
    converter = Converter()
    yield converter
    converter.stop()


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """hf_folder(name) -> (path, the transformers model), made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("hf"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def hf_command(hf_folder, tmp_path_factory):
    """hf_command(name): flags of a run on chat data in the words of that folder; its weights are for --init-from-hf."""
    words = write_words(tmp_path_factory.mktemp("words"))
    return lambda name: [*TRAIN, "--hf-model", hf_folder(name)[0], "--sft-data-path", words]


@pytest.fixture(scope="session")
def started(pool, hf_command, tmp_path_factory):
    """started(name): the single process that starts from that folder, and what is compared with it."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = Family(pool, tmp_path_factory.mktemp("reference"), [*hf_command(name), "--init-from-hf"])
        return made[name]

    return get
