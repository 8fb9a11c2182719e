"""Several replicas of the server that answer as one: a Ray Serve application.

A request goes ``ingress`` → ``router`` → ``replica``, and the answer streams back.

==================  ============================================================================================
``application``     the application, as ``serve deploy`` builds it and ``cacheblend-rag serve --ray`` runs it
``arguments``       its arguments
``ingress``         takes requests, finds their pieces, forwards answers
``router``          the router of Ray Serve that sends a request where its chunks lie
``routing``         its arithmetic: what each replica holds against how busy it is
``replica``         one server with its own folder, called without a socket, and what all must have in common
``calls``           a request as data, and an application that answers it
``pieces``          the pieces of a text: what chunks are called by
``summaries``       which of them a replica's memory and disk hold
==================  ============================================================================================
"""

from typing import TYPE_CHECKING

from cacheblend_rag.app.fleet.arguments import FleetArguments

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["FleetArguments", "app"]


# Ray reads the class of the arguments from the signature, so it is no text.
def app(arguments: FleetArguments) -> "Application":
    """The application, for ``import_path: cacheblend_rag.app.fleet:app`` in a configuration of Ray Serve."""
    from cacheblend_rag.app.fleet.application import build

    return build(arguments)
