"""`tuneline routes`: show and change the routing file of a running gateway."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.application import JsonOption, app, print_result

RoutingFileOption = Annotated[Path, typer.Option("--routes", help="Routing file.")]

routes_app = typer.Typer(
    no_args_is_help=True, help="Show and change the gateway's canaries, sticky assignments and shadow traffic."
)
app.add_typer(routes_app, name="routes")


@routes_app.command("show")
def show_routes(routes: RoutingFileOption = Path("routes.yaml"), as_json: JsonOption = False) -> None:
    """Show the routes of a file, and the targets that no longer receive traffic after an abort."""
    from pipelines.gateway import traffic_routing
    from pipelines.gateway.traffic_routes import read_routes

    found = read_routes(routes)
    aborts = [
        abort
        for abort in traffic_routing.read_aborts(traffic_routing.get_state_path(routes))
        if abort.route in found and found[abort.route].digest == abort.route_sha256
    ]
    result = {
        "routes": {name: route.model_dump() for name, route in found.items()},
        "aborts": [abort.model_dump(exclude={"route_sha256"}) for abort in aborts],
    }
    lines = [f"{name}: {traffic_routing.show_route(route)}" for name, route in found.items()]
    lines += [f"aborted: {each.target} of {each.route} at {each.at}: {each.reason}" for each in aborts]
    print_result(result, as_json, lines or [f"{routes} has no routes"])


@routes_app.command("set")
def set_route(
    name: Annotated[str, typer.Argument(help="Model name that clients request.")],
    targets: Annotated[
        list[str],
        typer.Option(
            "--target",
            help="Target and its relative weight, as MODEL=WEIGHT. Default weight: 1. Repeatable. The first target is "
            "the stable version; the others are canaries.",
        ),
    ],
    sticky: Annotated[
        str,
        typer.Option(
            "--sticky",
            help="Subject that always gets the same target: key, user or 'header NAME'. none: a random target per "
            "request.",
        ),
    ] = "none",
    shadow: Annotated[
        str,
        typer.Option(
            "--shadow",
            help="Model that receives copies of answered requests, and the share to copy, as MODEL=SHARE. Default "
            "share: 0.1. Default: no copies.",
        ),
    ] = "",
    can_abort: Annotated[
        bool,
        typer.Option(
            "--abort/--no-abort", help="Stop sending requests to a canary that performs worse than the first target."
        ),
    ] = True,
    min_requests: Annotated[
        int, typer.Option("--min-requests", help="Minimum number of canary requests before an abort.")
    ] = 50,
    max_slowdown: Annotated[
        float, typer.Option("--max-slowdown", help="Maximum ratio of the canary's latency to that of the first target.")
    ] = 2.0,
    routes: RoutingFileOption = Path("routes.yaml"),
    as_json: JsonOption = False,
) -> None:
    """Set the route of a name, and clear its earlier abort. The gateway reloads a changed file within two seconds."""
    from pipelines.gateway import traffic_routes, traffic_routing

    settings = {
        "targets": [
            {"model": model, "weight": weight or 1} for model, _, weight in (each.partition("=") for each in targets)
        ],
        "sticky": sticky,
        "abort": {"enabled": can_abort, "min_requests": min_requests, "max_slowdown": max_slowdown},
        "updated": datetime.now(UTC).isoformat(),
    }
    if shadow:
        model, _, share = shadow.partition("=")
        settings["shadow"] = {"model": model, **({"share": share} if share else {})}
    route = traffic_routes.set_route(routes, name, settings)
    lines = [f"{name}: {traffic_routing.show_route(route)}"]
    print_result({"name": name, "file": str(routes), "route": route.model_dump()}, as_json, lines)


@routes_app.command("clear")
def clear_routes(
    name: Annotated[str, typer.Argument(help="Name of the route. Default: all routes.")] = "",
    routes: RoutingFileOption = Path("routes.yaml"),
    as_json: JsonOption = False,
) -> None:
    """Remove one route or all routes. Each model then answers only requests for its own name."""
    from pipelines.gateway import traffic_routes

    removed = traffic_routes.clear_routes(routes, name)
    print_result({"cleared": removed, "file": str(routes)}, as_json, [f"{each}: no route" for each in removed])
