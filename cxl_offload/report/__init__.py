"""One HTML file about a machine, a plan, a run or a profile; it asks the network for nothing.

A page is a title and sections; what a section says is escaped where it is written, so names that
come from files are only ever text.
"""

from __future__ import annotations

from cxl_offload.report.page import PageSection, made_now, render_page
from cxl_offload.report.sections import (
    findings_section,
    machine_section,
    measured_section,
    placement_section,
    plan_sections,
    profile_sections,
    timeline_section,
    what_if_section,
)

__all__ = [
    "PageSection",
    "findings_section",
    "machine_section",
    "made_now",
    "measured_section",
    "placement_section",
    "plan_sections",
    "profile_sections",
    "render_page",
    "timeline_section",
    "what_if_section",
]
