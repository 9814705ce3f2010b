"""What a dataset's or a registry's image is called in a store."""

from __future__ import annotations

import pytest

from sandbox.images.names import instance_image, store_names


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("swebench:django__django-11099", "swebench/sweb.eval.x86_64.django_1776_django-11099"),
        ("swebench:django__django-11099", "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"),
        ("swebench:django__django-11099", "sweb.eval.x86_64.django__django-11099:latest"),
        ("swebench:Kozea__WeasyPrint-1", "swebench/sweb.eval.x86_64.kozea_1776_weasyprint-1"),
        ("swegym:getmoto__moto-5752", "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752"),
        ("swerebench:a__b-1", "swerebench/sweb.eval.x86_64.a_1776_b-1"),
        ("docker.io/swebench/x", "swebench/x:latest"),
        ("docker://swebench/x:latest", "swebench/x"),
        ("docker.io/library/debian", "debian"),
        ("debian", "debian:latest"),
        ("debian:12", "debian:12"),
        ("host:5000/x", "host:5000/x:latest"),
    ],
)
def test_an_image_is_found_under_the_names_that_mean_it(asked: str, stored: str) -> None:
    assert stored in store_names(asked)


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ("debian:12", "debian"),
        ("debian:12", "debian:12:latest"),
        ("swebench:a__b-1", "xingyaoww/sweb.eval.x86_64.a_s_b-1"),
        ("swebench:a__b-1", "swebench/sweb.eval.x86_64.a_1776_b-10"),
        ("unknown:a__b-1", "swebench/sweb.eval.x86_64.a_1776_b-1"),
    ],
)
def test_no_other_image_is_taken_for_it(asked: str, other: str) -> None:
    assert other not in store_names(asked)


def test_the_first_name_is_the_one_to_import() -> None:
    assert store_names("swebench:a__b-1", "arm64")[0] == instance_image("swebench", "a__b-1", "arm64")
    assert instance_image("swegym", "a__b-1") == "xingyaoww/sweb.eval.x86_64.a_s_b-1"
