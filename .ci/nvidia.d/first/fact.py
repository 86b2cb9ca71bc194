"""A fact: what was asked, the value, what is expected, and what another value means. On its way a line of JSON on stdout.

    ok           as expected, or nothing in particular is
    other        something else: wrong where `must`, only told where it is a figure
    unmeasured   no value, or a time on a stand-in, which has no meaning
"""

import json
import os

# The stand-in for libcuda, where there is no GPU.
STANDIN = os.environ.get("FEEDLINE_FIRST_STANDIN")
MARK = "fact "


def judged(asked, value, expected, meaning, unit="", must=False, timing=False, good=None, stop=False):
    """`expected`: text, (least, most) with None for no bound, or None. `stop`: after another value the rest says nothing."""
    if isinstance(expected, tuple):
        least, most = expected
        good = value is not None and (least is None or value >= least) and (most is None or value <= most)
        expected = f"at most {most}" if least is None else f"at least {least}" if most is None else f"{least} to {most}"
    elif good is None:
        good = expected in (None, value)
    verdict = "unmeasured" if value is None or timing and STANDIN else "ok" if good else "other"
    value = float(f"{value:.4g}") if isinstance(value, float) else value
    return {"name": asked, "value": value, "unit": unit, "expected": expected or "any", "verdict": verdict, "meaning": meaning,
            "must": must, "stop": stop, "stand_in": bool(STANDIN)}


def fact(*words, **settings):
    print(MARK + json.dumps(judged(*words, **settings)), flush=True)
