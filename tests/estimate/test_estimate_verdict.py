"""Verdicts of memo's own account: where each begins, and what is tight."""

import pytest
from capacity import gpu_bytes_for

from memo.estimate.calibration import FITS_SHARE, OOM_SHARE, USABLE_SHARE
from memo.estimate.memory_account import LOST_PAGES_BYTES
from memo.estimate.memory_errors import FULL_SIZE
from memo.estimate.unseen_memory import NOTHING, Unseen
from memo.estimate.verdict import TIGHT_BYTES, Capacity, Verdict, judge, room_for_unseen
from memo.units import GIB

HOST = 1e12


def test_memo_fits_up_to_what_torch_reports_less_lost_pages_and_the_error_of_the_count() -> None:
    capacity = Capacity(gpu_bytes_for(70 * GIB), HOST)
    assert capacity.sure_gpu_bytes == pytest.approx(70 * GIB)
    assert capacity.usable_gpu_bytes == pytest.approx((1 + FULL_SIZE.share) * 70 * GIB + LOST_PAGES_BYTES)
    assert judge(70 * GIB - 1, 0, capacity) == Verdict.FITS
    assert judge(70 * GIB + 1, 0, capacity) == Verdict.UNSURE
    assert judge(capacity.most_gpu_bytes + 1, 0, capacity) == Verdict.OOM


def test_it_is_unsure_as_long_as_less_may_be_unseen() -> None:
    capacity, unseen = Capacity(80 * GIB, HOST), Unseen(1 * GIB, 3 * GIB, 4 * GIB)
    needed = capacity.most_gpu_bytes + 2 * GIB
    assert judge(needed - 1, 0, capacity, unseen) == Verdict.UNSURE
    assert judge(needed + 1, 0, capacity, unseen) == Verdict.OOM
    assert judge(needed - 1, 0, capacity) == Verdict.OOM
    assert judge(needed - 1, 2 * HOST, capacity, unseen) == Verdict.OOHM


def test_tight_is_what_a_gib_more_or_the_most_that_was_published_breaks() -> None:
    capacity, wide = Capacity(80 * GIB, HOST), Unseen(0, 1 * GIB, 4 * GIB)
    assert (room_for_unseen(NOTHING), room_for_unseen(wide)) == (TIGHT_BYTES, 3 * GIB)
    for unseen in (NOTHING, wide):
        edge = capacity.sure_gpu_bytes - room_for_unseen(unseen)
        assert not capacity.is_tight(edge - 1, unseen) and capacity.is_tight(edge + 1, unseen)
        assert not capacity.is_tight(capacity.sure_gpu_bytes + 1, unseen)  # it does not fit at all


def test_megatron_keeps_the_shares_that_were_fitted_to_it() -> None:
    capacity = Capacity(80 * GIB, HOST, "megatron-lm")
    usable = USABLE_SHARE * 80 * GIB
    assert capacity.usable_gpu_bytes == usable
    assert judge(FITS_SHARE * usable - 1, 0, capacity) == Verdict.FITS
    assert judge(FITS_SHARE * usable + 1, 0, capacity) == Verdict.UNSURE
    assert judge(OOM_SHARE * usable + 1, 0, capacity) == Verdict.OOM
    assert not capacity.is_tight(FITS_SHARE * usable - 1, NOTHING)


@pytest.mark.parametrize(("share", "verdict"), [(0.9, Verdict.FITS), (0.95, Verdict.UNSURE), (1.01, Verdict.OOHM)])
def test_host_memory_has_its_own_line(share: float, verdict: Verdict) -> None:
    assert judge(1 * GIB, share * HOST, Capacity(80 * GIB, HOST)) == verdict
