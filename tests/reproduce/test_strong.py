"""`rankgrad reproduce strong`: a small one from end to end."""

import numpy as np
import pytest

from rankgrad.reproduce.data import raw_splits
from rankgrad.reproduce.tables import describe, make_strong, write
from rankgrad.reproduce.trials import Request
from rankgrad.runs.ensemble import Ensemble

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.* queries are too few")]


def test_strong_beside_trees_and_averaged_with_them(tmp_path):
    pytest.importorskip("xgboost", reason="xgboost is not installed")
    request = Request("synthetic:tiny", rows="strong,xgboost-8", seeds=1, epochs=2, out=tmp_path)
    result = write(make_strong(request, quiet=True), "none")
    rows = result["rows"]
    assert list(rows) == ["strong", "xgboost-8", "together"] and "below" not in rows["strong"]
    folders = [next((tmp_path / "runs" / row).iterdir()) for row in ("strong", "xgboost-8")]
    values = Ensemble.open(folders).evaluate(raw_splits("synthetic:tiny", 1)["test"], ("ndcg@10",))["ndcg@10"]
    found = rows["together"]["metrics"]["ndcg@10"]["empty=0"]["mean"]
    assert found == pytest.approx(np.nan_to_num(values).mean(), abs=1e-6)
    assert rows["together"]["below"]["difference"] == pytest.approx(
        rows["strong"]["metrics"]["ndcg@10"]["empty=1"]["mean"]
        - rows["together"]["metrics"]["ndcg@10"]["empty=1"]["mean"]
    )
    assert "averaged" in describe(result)
