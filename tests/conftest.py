import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

from models import FAMILIES, make_model


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name -> directory of a tiny random model with tokenizer."""
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
