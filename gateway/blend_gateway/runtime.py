"""What a running gateway is made of, and whether it is up."""

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from blend_gateway.documents import DocumentRegistry
from blend_gateway.errors import EngineDown, EngineNotReady
from blend_gateway.ports import ChatBackend
from blend_gateway.salts import DEFAULT_TENANT, Tenant
from blend_gateway.settings import Settings
from blend_gateway.telemetry import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts that exist once the engine is up."""

    backend: ChatBackend
    documents: DocumentRegistry


@dataclass(slots=True, kw_only=True)
class Runtime:
    """The parts that exist from the start, and the service once it is there.

    Args:
        settings: The gateway's settings.
        metrics: Its own series.
        service: None until the engine is up.
        failure: Why it never will be; None unless start-up failed.
        started: Set once there is a service or a failure.
    """

    settings: Settings
    metrics: Metrics
    service: Service | None = None
    failure: BaseException | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def require_service(self) -> Service:
        """The service.

        Raises:
            EngineNotReady: The engine is starting.
            EngineDown: The engine failed to start.
        """
        if self.failure is not None:
            raise EngineDown("the engine failed to start")
        if self.service is None:
            raise EngineNotReady("the engine is starting")
        return self.service


def runtime_of(request: Request) -> Runtime:
    """The runtime of the application that serves a request."""
    runtime: Runtime = request.app.state.runtime
    return runtime


def tenant_of(request: Request) -> Tenant:
    """Who is asking. The one place that decides it; keys will name other tenants here."""
    return DEFAULT_TENANT
