"""The adapter to vLLM's serving classes: the one part of the gateway that imports vLLM's HTTP side.

That tree moves between minors; `tests/gateway/test_serving_contract.py` holds every path and
signature used here.
"""

from blend_gateway.serving.backend import VllmBackend
from blend_gateway.serving.options import ServingOptions

__all__ = ["ServingOptions", "VllmBackend"]
