# One expression a line, each of which the fence ends.
def f: f; f
def f: [f]; f
def f: 1 + f; f
def f: f | f; f
def f: f, f; f
def f: {a: f}; f
def f: {(f): 1}; f
def f: .[f]; f
def f: .[f:f]; f
def f: "\(f)"; f
def f: @base64 "\(f)"; f
def f: -f; f
def f: f // 1; f
def f: f and f; f
def f: f == f; f
def f: if f then 1 else 2 end; f
def f: label $x | f; f
def f: f?; f
def f: first(f); f
def f: last(f); f
def f: limit(3; f); f
def f: f as [$x] | .; f
def f: f as {a: $x} | .; f
def f: foreach f as $x (0; .); f
def f: reduce f as $x (0; .); f
def f: map(f); def g: [g]; g
def f: try error("x") catch f; f
def f: (try f catch .) | f; f
def f(g): f(g | g); f(.)
def f(g): [g] | f(g | g); f(.)
def f(g): def h: g | f(h); h; f(.)
def f($x): f($x + 1); f(0)
def f($a; $b): f($b; [$a, $b]); f(1; 2)
def f: [1] | sort_by(f); f
def f: [1] | group_by(f); f
[repeat(.)]
last(repeat(.))
[recurse([.])]
[range(1e12)]
last(range(1e12))
range(1e12) | empty
[range(0; 1; 0)]
[limit(1e12; repeat(1))]
until(false; .)
[while(true; .)]
first(range(1e12) | select(. < 0))
foreach range(1e12) as $x (0; . + $x; empty)
foreach range(1e12) as $x (0; ., .; empty)
reduce range(1e12) as $x (0; ., .)
any(range(1e12); . < 0)
IN(range(1e12); -1)
INDEX(range(1e12); .)
"x" * 1e9
"x" * 1e18
"x" * 1e7 | explode
"x" * 1e7 | . / ""
"x" * 1e7 | split("x")
"x" * 1e7 | [splits("x")]
"x" * 1e7 | gsub("x"; "yy")
"x" * 1e5 | [match("x*y|x"; "g")]
"x" * 1e7 | @base64
"<" * 2e7 | @html
[range(100)] | map("x" * 1000000) | add
[range(100)] | map("x" * 1000000) | join(",")
[limit(100; repeat("x" * 1000000))]
[range(3000) | tostring | . as $p | "a" | test("[a-z]{50}" + $p)]
reduce range(1e6) as $i ("x"; . + .)
reduce range(1e6) as $i ([1]; . + .)
reduce range(1e6) as $i ({}; . + {($i | tostring): [., .]})
reduce range(40) as $i (0; [., .])
reduce range(40) as $i (0; [., .]) | tojson
reduce range(40) as $i (0; [., .]) | tostring
reduce range(40) as $i (0; [., .]) | @json "\(.)"
reduce range(40) as $i (0; [., .]) | . == .
reduce range(40) as $i (0; [., .]) | [., .] | sort
reduce range(40) as $i (0; [., .]) | flatten
reduce range(40) as $i (0; [., .]) | [..]
reduce range(40) as $i (0; [., .]) | [paths]
reduce range(40) as $i (0; [., .]) | [tostream]
reduce range(40) as $i (0; [., .]) | walk(.)
reduce range(40) as $i (0; [., .]) | (.. |= .)
reduce range(40) as $i (0; {a: ., b: .}) | . * .
reduce range(40) as $i (0; {a: ., b: .}) | to_entries | tojson
reduce range(1e5) as $i (0; [.])
reduce range(1e5) as $i (0; {a: .})
null | .[1e9] = 1
[1] | .[1e18] = 1
null | setpath([1e9]; 1)
[range(2e4)] | . - .
[range(1000)] | [., ., .] | [combinations]
[range(1e4)] | combinations(1e6)
[range(1e5)] | .[range(1e4):] |= .
{} | .[range(1e6) | tostring] = 1
0 | strftime("%F" * 1e6)
[.[]?, .[]?] | [range(1e9) as $x | .[]]
def f: [.] | .[] |= f; f
def f(g; $n): if $n == 0 then g else f(g | g; $n - 1) end; f(.; 60)
def f(g; $n): if $n == 0 then path(g) else f(g | g; $n - 1) end; f(.; 60)
def f(g; $n): if $n == 0 then g |= . else f(g | g; $n - 1) end; f(.; 60)
def f(g; $n): if $n == 0 then path(g) else f(g | g; $n - 1) end; null | f(.[0]; 60)
def f(g; $n): if $n == 0 then [paths(g)] else f(g, g; $n - 1) end; f(.; 60)
