"""Cache salts: what keeps one tenant's cached blocks, and blended blocks, out of another's reach.

vLLM's prefix cache finds a block only under the salt it was made with. Blended KV is not what a
full prefill computes, so requests that blend never share a salt with requests that must be exact,
nor with requests that blend by other rules.
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass

from blend_engine.protocol import BlendParams

DEFAULT_POOL = "private"
EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose KV, documents and quotas a request uses.

    Args:
        name: Identifies the tenant; never shown to another.
        pool: The part of the tenant's cache in use.
    """

    name: str
    pool: str = DEFAULT_POOL


DEFAULT_TENANT = Tenant(name="default")
"""The only tenant until keys name others."""


def blend_setting(params: BlendParams) -> str:
    """Name the rules a request blends by; requests that differ in them never share blocks."""
    return f"{params.policy}:{params.recompute_ratio!r}:{params.check_layer}"


def derive_salt(secret: bytes, tenant: Tenant, setting: str = EXACT) -> str:
    """Derive the cache salt of a request.

    Every field is preceded by its length, so no tenant's name can imitate another's name and pool.

    Args:
        secret: The server's key; whoever has it can guess salts.
        tenant: The caller.
        setting: `EXACT`, or what `blend_setting` says.

    Returns:
        43 characters of URL-safe base64; vLLM refuses the `/` of the other alphabet.
    """
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for field in (tenant.name, tenant.pool, setting):
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
