"""What handlers need of a request: the application, and who asks."""

from typing import Annotated

from fastapi import Depends, Request

from overspill.manager.actions import Caller
from overspill.manager.application import Application


def application_of(request: Request) -> Application:
    application: Application = request.app.state.application
    return application


def caller_of(request: Request) -> Caller:
    identity = request.state.identity
    return Caller(who=identity.who, address=request.state.address)


App = Annotated[Application, Depends(application_of)]
Who = Annotated[Caller, Depends(caller_of)]
