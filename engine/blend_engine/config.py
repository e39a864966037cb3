"""The connector's settings, to and from vLLM's ``kv_connector_extra_config``."""

from dataclasses import asdict, dataclass
from typing import Any, Self

EXTRA_CONFIG_KEY = "blend"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendConfig:
    """Settings of one engine's connector.

    Args:
        store_bytes: Byte budget of the host-memory store, per rank.
        min_segment_tokens: Shorter segments are neither compiled nor looked up.
        compile_queue_depth: Background compiles waiting at most; beyond it a miss stays a miss.
        pass_budget_tokens: Fresh tokens that passes may compute in one step; a longer pass is
            spread over steps. None: as many as vLLM's own prefill, `max_num_batched_tokens`.
    """

    store_bytes: int = 4 << 30
    min_segment_tokens: int = 32
    compile_queue_depth: int = 256
    pass_budget_tokens: int | None = None

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ValueError: A number is out of range.
        """
        for name, least in (
            ("store_bytes", 0),
            ("min_segment_tokens", 1),
            ("compile_queue_depth", 1),
            ("pass_budget_tokens", 2),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be >= {least}, got {value!r}")

    def to_extra_config(self) -> dict[str, Any]:
        """The dict for `KVTransferConfig.kv_connector_extra_config`."""
        return {EXTRA_CONFIG_KEY: asdict(self)}

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> Self:
        """From vLLM's config; defaults where it says nothing.

        Raises:
            ValueError: An unknown setting or a number out of range.
        """
        wire = extra_config.get(EXTRA_CONFIG_KEY, {})
        unknown = set(wire) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"unknown blend settings: {sorted(unknown)}")
        return cls(**wire)
