# ruff: noqa: F401  (the names are for `from farspan import stats`)
"""Statistics of forgetting curves: memory lengths with intervals, differences between runs. Tests of texts are in
`text_robustness`, which imports scipy.stats: that takes a second, and plans need none of it."""

from farspan.stats.forgetting_curves import (
    Map,
    MeasuredCurve,
    between,
    by_curve,
    curve,
    curves,
    gap,
    index_by_repeat,
    label,
    memory_index,
    memory_map,
    perplexity_label,
    repeats_near,
    short_text,
    shortest_judged,
    unpacked,
    version_label,
    whole_repeats,
)
from farspan.stats.headlines import (
    BOOTSTRAPS,
    CROSSINGS,
    HALF_LIFE,
    REACH,
    expansion,
    headline,
    headlines_sampled,
    multipliers,
    repeats_of,
)
from farspan.stats.intervals import (
    LEAST_PAIRS,
    LEVEL,
    bands,
    holm,
    interval,
    mean_error,
    measured_mean,
    paired_tost,
    student_mean,
    tost,
    two_sided,
    welch_error,
    within,
)
from farspan.stats.joint_test import exceeds
from farspan.stats.memory_lengths import JOINT_LEVEL, MemoryLength, Summary, by_chance, summarise
from farspan.stats.run_differences import (
    Difference,
    as_lengths,
    differences,
    differences_in_characters,
    interpolated,
    known_difference,
    signed_tokens,
)
