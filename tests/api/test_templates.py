from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from urllib.parse import quote

import pytest

from tests.api.conftest import Node
from tests.api.fake import EPOCH, template_info


def test_list_has_every_field_the_sdks_require(node: Node) -> None:
    info = node.service.template_infos[0]
    expected = {
        "templateID": "basetemplateid",
        "buildID": info.build_id,
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "public": False,
        "aliases": ["base"],
        "names": ["base"],
        "createdAt": "2026-01-01T00:00:00Z",
        "updatedAt": "2026-01-01T00:00:00Z",
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": 1,
        "envdVersion": "0.6.13",
        "buildStatus": "ready",
    }
    for path in ("/templates", "/templates?teamID=any", "/v2/templates"):
        assert node.call("GET", path).json == [expected]
    detail = node.call("GET", "/templates/base").json
    (build,) = detail.pop("builds")
    assert detail == expected
    assert build["buildID"] == info.build_id
    assert build["status"] == "ready"


def test_pages(node: Node) -> None:
    node.service.template_infos = [
        replace(template_info(f"t{number}", f"n{number}"), created_at=EPOCH + timedelta(days=number))
        for number in range(3)
    ]
    first = node.call("GET", "/v2/templates?limit=2")
    assert [item["templateID"] for item in first.json] == ["t2", "t1"]
    rest = node.call("GET", f"/v2/templates?limit=2&nextToken={first.headers['x-next-token']}")
    assert [item["templateID"] for item in rest.json] == ["t0"]
    assert rest.headers["x-next-token"] is None
    assert "limit" in node.refused(400, "GET", "/v2/templates?limit=0")
    assert [item["templateID"] for item in node.call("GET", "/templates").json] == ["t2", "t1", "t0"]


@pytest.mark.parametrize("name", ["ns/name:tag", "name:tag", "a b", "ü", "aliases", "100%"])
def test_names_are_one_segment_of_the_path(node: Node, name: str) -> None:
    node.service.template_infos.append(template_info("tid", name))
    encoded = quote(name, safe="")
    assert node.call("GET", f"/templates/{encoded}").json["templateID"] == "tid"
    assert node.call("GET", f"/templates/aliases/{encoded}").json == {"templateID": "tid", "public": False}
    assert node.call("DELETE", f"/templates/{encoded}").status == 204
    node.refused(404, "DELETE", f"/templates/{encoded}")
    node.refused(404, "GET", f"/templates/aliases/{encoded}")


def test_a_slash_that_is_not_encoded_splits(node: Node) -> None:
    node.service.template_infos.append(template_info("tid", "ns/name"))
    assert node.refused(404, "GET", "/templates/ns/name") == "no such path"


@pytest.mark.parametrize("name", ["%00", "%0a", "x" * 257])
def test_wrong_names(node: Node, name: str) -> None:
    assert "templateID" in node.refused(400, "GET", f"/templates/{name}")


def test_wrong_utf8_in_the_path(node: Node) -> None:
    node.refused(400, "GET", "/templates/%ff")
