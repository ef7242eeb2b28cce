"""Token dropping policies: who decides which tokens a cache keeps."""

from kvdata.edits.policies.base import Policy, Sees, Source, apply_policy
from kvdata.edits.policies.cache import KeyDiff, KeyNorm, Learned, Oracle, Random, Recency, ValueNorm

__all__ = [
    "TRAINING_FREE",
    "KeyDiff",
    "KeyNorm",
    "Learned",
    "Oracle",
    "Policy",
    "Random",
    "Recency",
    "Sees",
    "Source",
    "ValueNorm",
    "apply_policy",
]

TRAINING_FREE: tuple[Policy, ...] = (Random(), Recency(), KeyNorm(), KeyDiff(), ValueNorm())
