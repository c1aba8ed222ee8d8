"""Chat templates that try to take all memory or time: `python -m tests.tokens.hostile`, a process that may take little.

Those written down, then random ones of `--seeds 0-199`. Prints what does not end as it should, one a line.
"""

import argparse
import random
import resource
import sys
from datetime import datetime
from typing import Final

from segue.errors import ModelFileError
from segue.tokens import sandbox
from segue.tokens.template import TemplateRefusal, render_template

MEMORY_BYTES: Final = 900 << 20
"""Of addresses; the interpreter with its libraries has a third of them."""
CPU_S: Final = 300
WORK: Final = 1 << 27
"""The time bound is the product's, but for the number: it is met an eighth as late, so that this is quick."""

_GROWING = (
    "ns.s + ns.s",
    "ns.s ~ ns.s",
    "[ns.s, ns.s] | join",
    "'%s%s' % (ns.s, ns.s)",
    "'%(a)s%(a)s' % {'a': ns.s}",
    "'{0}{0}'.format(ns.s)",
    "'%s%s' | format(ns.s, ns.s)",
    "ns.s.replace('x', 'xx')",
    "ns.s | replace('x', 'xx')",
    "ns.s.join([ns.s, ns.s])",
    "ns.s * 2",
    "ns.s | indent(2, true) ~ ns.s",
    "(ns.s | safe) + ns.s",
)
_NESTING = (
    "[ns.l, ns.l]",
    "(ns.l, ns.l)",
    "{'a': ns.l, 'b': ns.l}",
    "dict(a=ns.l, b=ns.l)",
    "[ns.l] * 2",
    "[ns.l] + [ns.l]",
    "[ns.l, ns.l] | list",
    "[[ns.l, ns.l]] | sum(start=[])",
    "[ns.l, ns.l] | batch(2) | list",
)
_USES = (
    "ns.l",
    "ns.l ~ ''",
    "ns.l | string",
    "ns.l | tojson",
    "ns.l | tojson(indent=9000)",
    "'%s' % [ns.l]",
    "'{}'.format(ns.l)",
    "ns.l == ns.m",
    "ns.l in [ns.m]",
    "{(ns.l,): 1}",
    "{}[(ns.l,)]",
    "{}[ns.l].x",
    "{}.get((ns.l,))",
    "[ns.l, ns.m] | sort",
    "[ns.l, ns.m] | max",
    "[ns.l, ns.m] | unique | list",
    "ns.l is eq ns.m",
    "raise_exception(ns.l)",
    "joiner(ns.l)()",
    "namespace(a=ns.l) | string",
    "[loop, loop]",
    "[ns, ns] | map(attribute='l') | join",
)
_REPEATED = (
    "'y' in big",
    "big == other",
    "big < other",
    "big is upper",
    "big | title",
    "big | wordcount",
    "big | e",
    "big | urlencode",
    "big.split('y')",
    "big.count('y')",
    "big | list",
    "big[::2]",
    "numbers | sum",
    "numbers | sort",
    "numbers[1:]",
    "numbers | select('odd') | list",
    "numbers | map('string') | join",
    "7.5 in numbers",
    "dict(numbers | batch(2))",
    "namespace(dict(numbers | batch(2)))",
    "table.items() | string",
    "table.values() | list",
    "table | dictsort",
    "cycler(*numbers)",
)
BOMBS: Final = (
    *(
        "{% set ns = namespace(s='x') %}{% for i in range(50) %}{% set ns.s = "
        + each
        + " %}{% endfor %}{{ ns.s }}"
        for each in _GROWING
    ),
    "{% set ns = namespace(s='x') %}{% for i in range(50) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    *(
        "{% set ns = namespace(l=[1]) %}{% for i in range(50) %}{% set ns.l = "
        + each
        + " %}{% endfor %}{{ ns.l }}"
        for each in _NESTING
    ),
    *(
        "{% set ns = namespace(l=(1,), m=(1,)) %}{% for i in range(18) %}{% set ns.l = (ns.l, ns.l) %}"
        "{% set ns.m = (ns.m, ns.m) %}{% endfor %}{% for i in range(99000) %}{{ " + each + " }}{% endfor %}"
        for each in _USES
    ),
    *(
        "{% set big, other = 'x' * 4000000, 'x' * 4000000 %}{% set numbers = range(9000) | list %}"
        "{% set table = dict(numbers | batch(2)) %}{% set ns = namespace() %}"
        "{% for i in range(90000) %}{% set ns.x = (" + each + ") %}{% endfor %}"
        for each in _REPEATED
    ),
    "{{ '%200000000d' % 1 }}",
    "{{ '%.200000000f' % 1 }}",
    "{{ '%*d' % (200000000, 1) }}",
    "{{ '%(a)200000000d' % {'a': 1} }}",
    "{{ '%200000000d' | format(1) }}",
    "{{ '{:200000000d}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 200000000) }}",
    "{{ ('{:200000000}' | safe).format('<') }}",
    "{{ 'x'.center(2000000000) }}",
    "{{ 'x'.ljust(2000000000) }}",
    "{{ 'x'.rjust(2000000000) }}",
    "{{ 'x'.zfill(2000000000) }}",
    "{{ 'x' | center(width=2000000000) }}",
    "{% filter center(2000000000) %}x{% endfilter %}",
    "{% set x | center(2000000000) %}x{% endset %}",
    "{% autoescape 'x' | center(2000000000) %}x{% endautoescape %}",
    "{{ ('\\t' * 1000000).expandtabs(9000) }}",
    "{{ ('\\n' * 1000000) | indent(9000, true, true) }}",
    "{{ ('x\\n' * 10000) | indent('y' * 100000) }}",
    "{{ [1] | batch(2000000000, 'x') | list }}",
    "{{ [1] | slice(2000000000) | list }}",
    "{{ 1.5 | round(2000000000, 'ceil') }}",
    "{{ 10 ** 1000000000 }}",
    "{% set a = ('f' * 10000000) | int(base=16) %}{{ a // 3 }}",
    "{{ {'a': [1]} | tojson(indent=2000000000) }}",
    "{{ range(90000) | list | tojson(separators=('x' * 9000, 'y')) }}",
    "{{ range(90000) | list | tojson(indent='x' * 1000000) }}",
    "{{ 'x' * 10000000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ [[0] * 1000] * 100000 }}",
    "{{ (' x' * 15000000).split() | length }}",
    "{{ ('\\n' * 30000000).splitlines() | length }}",
    "{{ ('x' * 30000000) | list | length }}",
    "{{ ('x' * 1000000).join(['y'] * 100000) }}",
    "{{ range(10000) | join('x' * 10000000) }}",
    "{{ range(1000) | map('replace', '1', 'x' * 10000000) | list }}",
    "{{ ([[0] * 100] * 1000) | sum(start=[]) }}",
    "{% set ns = namespace(b='x' * 10000000) %}{{ ([ns] * 1000) | join(attribute='b') }}",
    "{% set l = range(90000) | list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "{% set l = range(90000) | list %}{% for a in l %}{% for b in l if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}"
    "{{ m(40, 1, 2) }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(1) }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% block a %}{% for i in range(9) %}"
    + "x" * 100000
    + "{% endfor %}{% endblock %}"
    + "{{ self.a() }}" * 1000,
    "{% for x in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = namespace(x=ns.x, y='x' * 9000) %}"
    "{% endfor %}",
    "{% set d = dict(range(90000) | batch(2)) %}{% for i in range(9000) %}{{ d.items() | string }}{% endfor %}",
    "{{ 'x'.encode() }}",
    "{{ (1).to_bytes(1000000000) }}",
    "{{ 'x'.translate({120: 'x' * 10000000}) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ strftime_now('%d' * 10000000) }}",
    "{{ raise_exception('x' * 30000000) }}",
    "{% autoescape true %}{{ '<' * 30000000 }}{{ ('<' * 3000000) | e | forceescape }}{% endautoescape %}",
    "{{ x(a=1,a=2) }}",
    "{% break %}",
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ 1" + " + 1" * 20000 + " }}",
    "{{ " + "not " * 20000 + "1 }}",
    "{{ a" + ".a" * 20000 + " }}",
    "{{ f(__debug__=1) }}",
    "{{ 1[1:2] }}",
    "{#" * 50000,
    "{{" * 50000,
    " " * 250000 + "{%- if 1 %}",
    "x" * 1000000,
    "\0{{ '\0' }}",
    "{% include 'x' %}",
)


def _random_template(seed: int) -> str:
    """A loop in which values grow out of each other."""
    chance = random.Random(seed)
    steps = []
    for _ in range(chance.randint(2, 6)):
        if chance.random() < 0.6:
            name, value = "s", chance.choice(_GROWING)
            if chance.random() < 0.3:
                value = f"({value}) ~ '{chance.choice(('é', '😀', '<', chr(1)))}'"
        else:
            name, value = "l", chance.choice((*_NESTING, "[ns.s, ns.l]", "(ns.s | list)", "ns.s.split('x')"))
        steps.append(f"{{% set ns.{name} = {value} %}}")
        if chance.random() < 0.3:
            steps.append(f"{{{{ {chance.choice(_USES)} }}}}")
    chance.shuffle(steps)
    start = "{% set ns = namespace(s='x', l=[1], m=[1]) %}"
    return f"{start}{{% for i in range({chance.choice((9, 30, 9000))}) %}}{''.join(steps)}{{% endfor %}}"


def wrong_end(template: str) -> str | None:
    """What is wrong with how the rendering ends; None: it ends as it should."""
    messages = [{"role": "user", "content": "hello", "children": [1, 2]}]
    try:
        render_template(template, {"messages": messages}, now=datetime(2025, 1, 1))
    except (ModelFileError, TemplateRefusal) as error:
        reason = str(error)
        if "MemoryError" in reason:
            return "took all memory"
        return None if reason.isprintable() and 0 < len(reason) < 400 else f"says {reason[:500]!a}"
    except BaseException as error:
        return f"raises {type(error).__name__}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", default="0-199", help="a seed, or a range first-last (default %(default)s)"
    )
    parser.add_argument("--whole-time", action="store_true", help="with the product's bound of time")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if not args.whole_time:
        sandbox.MAX_WORK = WORK
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    failed = 0
    for template in (*BOMBS, *map(_random_template, seeds)):
        wrong = wrong_end(template)
        if wrong is not None:
            failed += 1
            print(f"{wrong}: {template[:300]!a}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
