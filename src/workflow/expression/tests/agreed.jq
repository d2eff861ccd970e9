# One expression a line, of which jq 1.6 gives the same result.
.
.s
.missing
.o.y[1].z
.o | keys
.o["x"]
.["o"].x
.l[0]
.l[-1]
.l[9]
.l[1:]
.l[:-1]
.l[1:3]
.l[-2:]
.l[1.2:2.5]
.s[1:3]
.u[1:3]
.z[1:2]
.z.a.b
.o.x?
.i.a
[.i.a?]
[.l[]?]
[.i[]?]
.[]
[.[] | numbers]
[.[] | strings]
[.[] | scalars] | length
[.[] | iterables] | length
[.[] | nulls, booleans]
[..] | length
[.o | ..]
.i + 1
.i - 1.5
.i * 2
.i / 2
.i % 4
-7 % 3
7 % -3
5.9 % 2.9
.i / 0
.i % 0
1e1000
-(.i)
.s + "x"
.s - "x"
.s * 2
.s * 0
.s * 0.5
.s / ","
"" / ","
"abc" / ""
.l + [9]
.l - [1]
.o + {x: 5, w: 6}
.o * {y: 7, q: {r: 1}}
{a: {b: 1, c: 2}} * {a: {b: 3}}
.z + 1
1 + .z
[] + {}
.t and .z
.t or .z
.z // 5
.e[] // 5
[(false, null, 1, 2) // 3]
.t | not
[1 < 2, "a" < "b", [] < {}, null < false, 1 == 1.0, "1" == 1]
[[1, 2] < [1, 3], {a: 1} < {b: 0}, {a: 1} < {a: 2}, {a: 2} < {b: 1, a: 1}]
if .t then 1 else 2 end
if .z then 1 elif .t then 2 else 3 end
[if (true, false) then 1 else 2 end]
try error("x") catch .
try error({a: 1}) catch .a
[range(5)]
[range(2; 5)]
[range(0; 10; 3)]
[range(5; 0; -2)]
[range(0, 1; 3, 4)]
[limit(3; range(10))]
[first(range(5)), last(range(5)), nth(2; range(5))]
[.l | first, last, nth(1)]
[range(10)] | first(.[] | select(. > 3))
[1 | recurse(if . < 4 then . + 1 else empty end)]
[2 | recurse(. * .; . < 100)]
[1 | while(. < 50; . * 2)]
[1 | until(. > 50; . * 2)]
isempty(empty)
isempty(1, error("x"))
[.l | any(. > 2), all(. > 0)]
[[true, false] | any, all]
[[] | any, all]
[any(range(5); . == 3), all(range(5); . < 3)]
.l | add
.e | add
.m | map(.v) | add
[.s, .z, "x"] | add
.o | add
.l | length
.u | length
.u | utf8bytelength
.n | length
.z | length
.t | length
.o | length
.l | sort
[.[]] | sort | map(type)
.m | sort_by(.k)
.m | sort_by(.k, .v)
.m | sort_by(-.v)
.m | group_by(.k)
.m | unique_by(.k)
.l | unique
.l | min, max
[.l | min, max]
[.m | min_by(.v), max_by(.v)]
[.e | min, max]
.l | reverse
[.l | index(1), rindex(1), indices(1)]
[.s | index(","), rindex(","), indices(", ")]
[1, 2, 1, 2] | indices([1, 2])
.z | indices(1)
.l | contains([1])
.o | contains({x: 1})
.s | contains("b")
"foobar" | contains("bar")
["foobar", "baz"] | contains(["bar"])
{a: [1, {b: 2}]} | contains({a: [{b: 2}]})
1 | contains("a")
"b" | inside("abc")
.l | has(1), has(9)
[.l | has(1), has(9)]
[.o | has("x"), has("q")]
["x", "q"] | map(in({x: 1}))
.o | to_entries
.o | with_entries(.value |= tostring)
[{key: "a", value: 1}, {name: "b", value: 2}, {k: "c", v: 3}] | map(select(.k | not)) | from_entries
.o | to_entries | from_entries
.o | map_values(tostring)
.l | map_values(. + 1)
.l | map(. * 2)
[.o | paths]
[.o | paths(type == "number")]
[.o | leaf_paths]
[path(.o.y[1].z)]
[path(.l[1:3])]
[path(.o[])]
[.o | path(..)]
path(1)
getpath(["o", "y", 1, "z"])
getpath(["o", "q", "r"])
getpath(["s", "q"])
setpath(["o", "q", "r"]; 5)
null | setpath([2]; 1)
null | setpath(["a", 0, "b"]; 1)
delpaths([["o", "x"], ["l", 0]])
del(.o.x)
del(.o.q.r)
del(.l[0, 1])
del(.l[1:])
del(.l[-1])
del(.o, .l)
del(.m[] | select(.v > 0))
.o.x = 5
.o.q.r = 5
.l[5] = 1
.l[-1] = 9
.l[-9] = 9
.l[1:3] = [7]
.o.x |= . + 1
.l[] |= . + 1
.l[] += 1
.o.x += 1
.o.x -= 1
.o.x *= 2
.o.x /= 2
.o.q //= 3
.o.x //= 3
.o.y[1].z |= 4
(.o.x, .i) = 9
(.m[] | select(.k == "b") | .v) |= 5
.l |= map(. + 1)
.o |= with_entries(.key |= "_" + .)
.l | to_entries
[.l as [$a, $b] | $a, $b]
.m[0] as {k: $k, v: $v} | [$k, $v]
.m[0] as {$k, "v": $v} | [$k, $v]
.o as {y: [$p, {z: $q}]} | [$p, $q]
[.l[] as $x | $x * 2]
reduce .l[] as $x (0; . + $x)
[foreach .l[] as $x (0; . + $x)]
[foreach .l[] as $x (0; . + $x; [$x, .])]
reduce .m[] as {k: $k, v: $v} ({}; .[$k] += [$v])
[label $out | foreach .l[] as $x (0; . + $x; if . > 4 then ., break $out else . end)]
def f: . + 1; .i | f | f
def f(g): g | g; .i | f(. * 2)
def f($a; $b): $a + $b; f(1; 2)
def fac: if . <= 1 then 1 else . * (. - 1 | fac) end; 10 | fac
def f(x): x * 2; f(1, 2)
{a: 1, "b": 2, "c d": 3, (.s): 4, @base64 "x": 5}
{s, i}
{"a\(.i)": .i}
{(.l[] | tostring): 1}
{a: (1, 2)}
.s as $s | {$s}
"a\(.i)b\(.o)c\(.z)"
"\(1 + 2) \("x" + "y")"
[.[] | tostring]
[.[] | tojson]
[.[] | tojson | fromjson] | length
"[1, {\"a\": null}]" | fromjson
"[1," | fromjson
["1", " 2", "x"] | map(try tonumber catch "no") | length
"12" | tonumber
"1.5e2" | tonumber
.l | tonumber
[.[] | type]
.s | split(",")
.s | split(", *"; null)
.s | [splits(", *")]
.l | join(",")
["a", null, 1, true] | join("-")
[] | join(",")
[[1]] | join(",")
.u | ascii_downcase
.s | ascii_upcase
[.s | startswith("a"), endswith("c")]
1 | startswith("a")
.s | ltrimstr("a"), rtrimstr("c")
[.s, 1] | map(ltrimstr("a"))
.u | explode
.u | explode | implode
[.s | test("b"), test("B"), test("B"; "i")]
.s | [match("[a-z]"; "g") | .string, .offset]
.s | match("(?<x>b),")
.u | [match("ß") | .offset, .length]
.s | capture("(?<first>[a-z]),(?<second>[a-z])")
[.s | scan("[a-z]")]
[.s | scan("([a-z]),")]
.s | sub(","; ";")
.s | gsub(","; ";")
.s | gsub("(?<l>[a-z])"; "<\(.l)>")
"aXbxc" | ascii_downcase | split("x")
"test" | test("T"; "ix")
"a.b" | split(".")
@text "x\(.l)"
@json "x\(.l)"
@csv "\([1, "a\"b", null, true])"
@tsv "\([1, "a\tb", null, true])"
@sh "echo \(.u)"
@sh "echo \(.l)"
@base64 "\(.u)"
.b | @base64d
.s | @base64
.l | @json, @text
[1, [2]] | @csv
.o | @csv
[.n | floor, ceil, round, fabs]
[.i | sqrt, pow(.; 2), log, exp]
[2.5, -2.5, 1.4] | map(round)
[1, 2.5, -1] | map(floor)
[infinite, -infinite] | map(isinfinite)
[nan, 1] | map(isnan)
[1, nan, 0] | map(isnormal)
[nan] | sort
[nan, 1] | min
nan
.l | flatten
[1, [2, [3, [4]]]] | flatten
[1, [2, [3, [4]]]] | flatten(1)
[1] | flatten(-1)
[[1, 2], [3]] | transpose
[[1, 2], [3, 4]] | [combinations]
[[0, 1] | combinations(2)]
[.o | tostream]
fromstream(.o | tostream)
[.o | 1 | truncate_stream([[0], 1], [[1, 0], 2], [[1, 0]], [[1]])]
[.l | .[] | IN(1, 2)]
.l | IN([3, 1, 2, 1])
IN(1, 2; 2, 3)
INDEX(.m[]; .k)
.m | INDEX(.v)
.o | walk(if type == "number" then . + 1 else . end)
[.o | recurse | numbers]
.d | fromdate
.d | fromdateiso8601
1425599621 | todate
1425599621 | gmtime
1425599621 | gmtime | mktime
1425599621 | strftime("%A, %B %d, %Y %j %H:%M:%S %Z")
0 | strftime("%Y-%m-%dT%H:%M:%SZ %a %b %e %u %w %y %C %D %F %T %R %I %p")
-1 | todate
951782400 | todate
4107542400 | todate
[.l | bsearch(1)] | length
[1, 2, 3] | bsearch(2), bsearch(0), bsearch(4)
[[1, 2, 3] | bsearch(2), bsearch(0), bsearch(4)]
splits("x")
[.[] | objects | keys]
.l as $l | [$l[] | . as $x | $l | index($x)]
[.m[] | .k] | unique | length
.m | map({(.k): .v}) | add
.m | map(select(.v >= 1)) | length
.o | [.[]] | length
[.l, .e] | map(length)
try (.s | .a) catch "e"
.s | .[0]
[.e[0], .e[-1]]
.l | .[["a"]]
[3, [4]] | .[[3]]
ascii_downcase
[65, 97] | map([.] | implode)
"x" | ascii_downcase | @base64 | @base64d
[splits("a")?]
.[("s", "i")]
[.s, .i] == [.["s", "i"]]
. as {s: $x} | $x
.. |= .
[.. | select(type == "boolean")]
{} | .a.b.c = 1
{} | .a[1] = 1
[1, 2, 3] | .[1:] |= map(. * 2)
[[1, 2], [3, 4]] | .[][0] |= . + 10
[1, null, 2] | map(values)
{"a": 1} | has("a", "b")
[limit(1; 1, error("x"))]
[.l[] | if . == 1 then empty else . end]
[1, 2] | .[0] as $x | .[1] as $y | $x + $y
