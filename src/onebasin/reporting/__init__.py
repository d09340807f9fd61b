"""A report as one HTML file."""

from onebasin.reporting.report import Report, render

__all__ = ["Report", "render"]
