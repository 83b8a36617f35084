"""Curves that a trial reports."""

from mup_tpu.study.report import _MOST_POINTS, Curve


def test_a_step_that_is_reported_again_replaces_its_loss():
    curve = Curve()
    for step, loss in ((1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0)):
        curve.add(step, loss)
    assert curve.points == [(1, 3.0), (2, 2.5), (3, 1.0)]


def test_a_long_curve_keeps_every_second_point_and_the_newest():
    curve = Curve()
    for step in range(1, 2 * _MOST_POINTS + 2):
        curve.add(step, float(step))
    steps = [step for step, _ in curve.points]
    assert _MOST_POINTS / 2 <= len(steps) <= _MOST_POINTS and steps[-1] == 2 * _MOST_POINTS + 1
    assert steps[0] == curve.stride == steps[1] - steps[0] > 1
