"""Token dropping policies: who decides which tokens a cache keeps."""

from collections.abc import Callable, Mapping

from kvdata.edits.policies.base import Policy, Sees, Source, apply_policy, apply_policy_at
from kvdata.edits.policies.cache import KeyDiff, KeyNorm, Learned, Oracle, Random, Recency, ValueNorm
from kvdata.edits.policies.compaction import Compaction
from kvdata.edits.policies.queries import RKV, TOVA, ExpectedAttention, QueryPolicy, SnapKV, SnapKVQuestion
from kvdata.edits.policies.refit import ValueRefit
from kvdata.edits.rope import Rope

__all__ = [
    "POLICIES",
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
    "ValueRefit",
    "apply_policy",
    "apply_policy_at",
]

TRAINING_FREE: tuple[Policy, ...] = (Random(), Recency(), KeyNorm(), KeyDiff(), ValueNorm())
"""Those that need neither training nor queries."""

POLICIES: Mapping[str, Callable[[Rope], Policy]] = {
    "random": lambda rope: Random(),
    "recency": lambda rope: Recency(),
    "key-norm": lambda rope: KeyNorm(),
    "keydiff": lambda rope: KeyDiff(),
    "value-norm": lambda rope: ValueNorm(),
    "snapkv": SnapKV,
    "tova": TOVA,
    "expected-attention": ExpectedAttention,
    "r-kv": RKV,
    "compaction": Compaction,
    "snapkv-question": SnapKVQuestion,
    "oracle": lambda rope: Oracle(),
}
"""Every policy that needs no weights, by name; made for the model whose RoPE is given."""
