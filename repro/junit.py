"""Findings of the gate as JUnit XML, as CI systems read it: no clock, no host, equal findings give equal bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from repro.gate import Finding

UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML 1.0


def junit_xml(suites: Mapping[str, Sequence[Finding]]) -> bytes:
    """One testsuite for each suite; what is undecided or not judged is skipped, with its reason."""
    root = ElementTree.Element("testsuites")
    for name, findings in suites.items():
        skipped = sum(item.state in ("undecided", "not_judged") for item in findings)
        failures = sum(item.state == "failed" for item in findings)
        counts = {"tests": len(findings), "failures": failures, "errors": 0, "skipped": skipped}
        attributes = {"name": name, **{key: str(count) for key, count in counts.items()}}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for item in findings:
            _add_case(suite, name, item)
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _add_case(suite: ElementTree.Element, suite_name: str, item: Finding) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"repro.gate.{suite_name}", name=_clean(item.name))
    message = _clean(item.message)
    if item.state == "failed":
        ElementTree.SubElement(case, "failure", message=message, type=suite_name).text = message
    elif item.state == "passed":
        ElementTree.SubElement(case, "system-out").text = message
    else:
        ElementTree.SubElement(case, "skipped", message=message)


def _clean(words: str) -> str:
    return UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", words)
