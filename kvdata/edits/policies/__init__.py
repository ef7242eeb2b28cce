"""Token dropping policies: who decides which tokens a cache keeps."""

from kvdata.edits.policies.base import Policy, Sees, Source, apply_policy
from kvdata.edits.policies.cache import KeyDiff, KeyNorm, Learned, Oracle, Random, Recency, ValueNorm
from kvdata.edits.policies.compaction import Compaction
from kvdata.edits.policies.queries import RKV, TOVA, ExpectedAttention, QueryPolicy, SnapKV, SnapKVQuestion

__all__ = [
    "RKV",
    "TOVA",
    "TRAINING_FREE",
    "Compaction",
    "ExpectedAttention",
    "KeyDiff",
    "KeyNorm",
    "Learned",
    "Oracle",
    "Policy",
    "QueryPolicy",
    "Random",
    "Recency",
    "Sees",
    "SnapKV",
    "SnapKVQuestion",
    "Source",
    "ValueNorm",
    "apply_policy",
]

TRAINING_FREE: tuple[Policy, ...] = (Random(), Recency(), KeyNorm(), KeyDiff(), ValueNorm())
"""Those that need neither training nor queries."""
