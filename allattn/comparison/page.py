"""The comparison as one HTML page that needs nothing else: no network, no script, no other file."""

from base64 import b64encode

from jinja2 import Environment, StrictUndefined

from allattn.comparison.comparison import Comparison
from allattn.comparison.pictures import CAPTIONS
from allattn.comparison.tables import COLUMNS, RUN_COLUMNS, TITLE, cells, notes, run_cells
from allattn.comparison.variants import shared_settings

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 84rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; text-align: right; border-bottom: 1px solid #d0d0d0; vertical-align: top; }
th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; }
th:first-child, td:first-child, .texts td, .texts th { text-align: left; }
td { white-space: nowrap; } .texts td, .wrap { white-space: normal; overflow-wrap: break-word; }
.wrap { min-width: 9rem; max-width: 16rem; text-align: left; }
img { max-width: 100%; height: auto; } figure { margin: 1.5rem 0; }
figcaption, .notes { color: #444; font-size: .875rem; }
.warnings { border-left: 4px solid #b34700; padding: .2rem 1rem; background: #fdf4ec; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ runs|length }} finished runs in {{ rows|length - 1 }} variants, all scored on the same text
({{ "{:,}".format(tokens) }} test tokens).</p>
{%- if warnings or left_out %}
<div class="warnings">
{%- if warnings %}
<h2>To keep in mind</h2>
<ul>{% for line in warnings %}
<li>{{ line }}</li>{% endfor %}
</ul>
{%- endif %}
{%- if left_out %}
<h2>Left out of every mean</h2>
<ul>{% for run in left_out %}
<li>{{ run.where }}: {{ run.why }}</li>{% endfor %}
</ul>
{%- endif %}
</div>
{%- endif %}
<h2>Table</h2>
<div class="wide"><table id="variants">
<thead><tr>{% for column in columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}
<tr>{% for cell in row %}<td{% if loop.first %} class="wrap"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div>
<ul class="notes">{% for note in notes %}
<li>{{ note }}</li>{% endfor %}
</ul>
<h2>Pictures</h2>
{%- for picture in pictures %}
<figure><img alt="{{ picture.caption }}" src="data:image/svg+xml;base64,{{ picture.data }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{%- endfor %}
<h2>Runs</h2>
<div class="wide"><table id="runs">
<thead><tr>{% for column in run_columns -%}
<th scope="col"{% if loop.index < 3 or loop.last %} class="wrap"{% endif %}>{{ column }}</th>
{%- endfor %}</tr></thead>
<tbody>{% for row in runs %}
<tr>{% for cell in row %}<td{% if loop.index < 3 or loop.last %} class="wrap"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{%- endfor %}
</tbody></table></div>
<h2>Settings that all runs share</h2>
<div class="wide"><table id="settings" class="texts">
<thead><tr><th scope="col">setting</th><th scope="col">value</th></tr></thead>
<tbody>{% for name, value in settings.items() %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{%- endfor %}
</tbody></table></div>
</body>
</html>
"""


def html_page(comparison: Comparison, pictures: dict[str, bytes]) -> str:
    """The page. Every text in it is escaped: names of runs and settings may hold anything.

    Args:
        comparison: what to show.
        pictures: SVG by name.
    """
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)
    return template.render(
        title=TITLE,
        tokens=comparison.runs[0].text[2],
        warnings=comparison.warnings,
        left_out=comparison.left_out,
        columns=COLUMNS,
        rows=cells(comparison),
        notes=notes(comparison),
        pictures=[
            {"caption": CAPTIONS[name], "data": b64encode(data).decode()} for name, data in pictures.items()
        ],
        run_columns=RUN_COLUMNS,
        runs=run_cells(comparison),
        settings=shared_settings(comparison.runs),
    )
