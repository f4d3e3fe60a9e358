"""Requests drawn from the OpenAPI description, right and wrong: what it promises is what comes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.unit.test_serve import files_of, folder, made  # noqa: F401

pytestmark = pytest.mark.slow
PROMISES = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.mark.parametrize("kind", ["POSITIVE", "NEGATIVE"])
def test_every_drawn_request_gets_a_promised_answer(kind: str, folder: Path) -> None:  # noqa: F811
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    from qtuning.serve.app import make_app
    from qtuning.serve.service import Service

    promises = [not_a_server_error, *(getattr(checks, name) for name in PROMISES)]
    before = files_of(folder / "tasks")
    app = make_app(Service(folder))
    api = schemathesis.openapi.from_asgi("/openapi.json", app)
    drawn = 0
    for found in api.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[kind]))
        @settings(
            max_examples=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        def ask(case) -> None:
            nonlocal drawn
            drawn += 1
            case.validate_response(case.call(), checks=promises)

        try:
            ask()
        except BaseException as error:
            if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):  # nothing to draw wrongly
                raise
    app.state.desk.close()
    assert drawn > 200
    after = files_of(folder / "tasks")
    assert {name: after.get(name) for name in before} == before  # no drawn name hits a task
