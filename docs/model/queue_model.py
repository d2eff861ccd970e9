#!/usr/bin/env python3
"""Exhaustive small models of taskd's queue and flow. See README.md. No dependencies.

  python3 queue_model.py            all scenarios (about a minute or two)
  python3 queue_model.py NAME ...   only those whose name contains NAME
Each scenario says what is expected (holds / breaks); exit 1 when one does not come out as expected.
"""
import sys, time
from collections import deque

LIMIT = 3_000_000
bits = lambda m: bin(m).count("1")


# ------------------------------------------------------------------ search
def explore(init, actions, invariant, limit=LIMIT):
    """BFS. actions(s) yields (label, next, helpful worker set mask or None for faults)."""
    parent = {init: None}
    todo = deque([init])
    edges = {}
    while todo:
        s = todo.popleft()
        bad = invariant(s)
        if bad:
            return parent, edges, (bad, s)
        out = []
        for label, n, who in actions(s):
            if n == s:
                continue
            out.append((n, who))
            if n not in parent:
                parent[n] = (s, label)
                todo.append(n)
        edges[s] = out
        if len(parent) > limit:
            return parent, edges, ("STATE LIMIT", s)
    return parent, edges, None


def trace(parent, s):
    path = []
    while parent[s]:
        s, label = parent[s]
        path.append(label)
    return path[::-1]


def stuck(parent, edges, goal, sets):
    """Strong liveness: with only the workers of S (and the system itself) acting, no faults, every order of
    steps ends in a goal state. Helpful steps never undo each other, so it is enough that no state outside
    the goal lacks a helpful step, and that helpful steps have no cycle."""
    for S in sets:
        done = {}
        for root in parent:
            if root in done:
                continue
            stack = [(root, iter([n for n, who in edges[root] if who is not None and who & ~S == 0]))]
            done[root] = 1
            while stack:
                s, it = stack[-1]
                n = next(it, None)
                if n is None:
                    done[s] = 2
                    stack.pop()
                elif n not in done:
                    done[n] = 1
                    stack.append((n, iter([m for m, who in edges[n] if who is not None and who & ~S == 0])))
                elif done[n] == 1:
                    return ("CYCLE of helpful steps, workers %s" % bin(S), n)
        for s in parent:
            if not goal(s) and not any(who is not None and who & ~S == 0 for _, who in edges[s]):
                return ("STUCK with workers {%s} willing" % ",".join("abcd"[i] for i in range(4) if S >> i & 1), s)
    return None


# ------------------------------------------------------------------ model 1: the queue (design 4)
# state: (lanes, recs, delayed, limbo, faults, extra)
#  lanes  ((elements, pointers), ...) retry first; element (task, cap, taken), oldest first, pointers relative to C
#  recs   per task (status, credited mask, holder mask); status L live, F finished, X cancelled or dead
#  delayed, limbo  per task: replicas in backoff; expiry records between lease and retry
def queue(W=3, nums=(1, 2), fails=2, bound=2, dup_exp=0, dup_enq=0, drops=0, cancels=0, rebuilds=0,
          expiry="one_step", advance="always", clamp=True, ask_record=True, enqueue_check=True, room="record", rotate=False, reset_c=False, newest=None):
    T = len(nums)
    init_lane = tuple((t, nums[t], 0) for t in range(T))
    zero = (0,) * W
    init = (((), zero), (init_lane, zero)), tuple(("L", 0, 0) for _ in nums), (0,) * T, (0,) * T, \
        (fails, dup_exp, dup_enq, drops, cancels, rebuilds, 0), ""

    # newest: only the newest element of a task offers what is left; None: every element does. The newest offer is pushed by each replica that
    # comes back ("always"), or, to show what that rule is for, only where no element of the task stands in a lane ("seldom").
    # room="element": an element offers cap - taken (the letter). room="record": what is left is counted in the task's
    # record, and every element of the task still in a lane offers it.
    def live(el, recs, wait):
        t = el[0]
        st, cr, ho = recs[t]
        left = el[1] - el[2] if room == "element" else nums[t] - bits(cr) - bits(ho) - wait[t]
        return left > 0 and st == "L" and el[1] > 0

    def trim(lane, recs, wait):
        els, p = lane
        k = 0
        while k < len(els) and not live(els[k], recs, wait):
            k += 1
        if rotate and k < len(els):      # stuck tail in front of markers: move it to the head
            rest = els[k:]
            dead = sum(not live(e, recs, wait) for e in rest)
            if dead > 1:
                e = rest[0]
                els, k = els + ((e[0], e[1] - e[2], 0),), k + 1
        if reset_c and k == len(els):
            return (), p                  # C forgotten with the empty list, P kept: the pointers are now too far
        els = els[k:]
        return els, tuple((max(x - k, 0) if clamp else x - k) for x in p)

    def put(t, tup, v):
        return tup[:t] + (v,) + tup[t + 1:]

    def fault(f, i):
        return put(i, f, f[i] - 1)

    def push(lanes, i, el):
        if newest == "seldom" and any(e[0] == el[0] for els, _ in lanes for e in els):
            return lanes
        if newest:
            lanes = tuple((tuple((t, 0 if t == el[0] else cap, taken) for t, cap, taken in els), p) for els, p in lanes)
        els, p = lanes[i]
        return put(i, lanes, (els + (el,), p))

    def actions(s):
        lanes, recs, delayed, limbo, f, _ = s
        wait = tuple(x + y for x, y in zip(delayed, limbo))
        for w in range(W):
            b = 1 << w
            if f[6] & b:                  # gone for good: its leases run out
                for t in range(T):
                    st, cr, ho = recs[t]
                    if ho & b and st == "L":
                        nr = put(t, recs, (st, cr, ho & ~b))
                        yield "lease of %s on t%d runs out" % ("abcd"[w], t), (lanes, nr, put(t, delayed, delayed[t] + 1), limbo, f, ""), 0
                continue
            if bits(f[6]) < W - max(nums):
                yield "abcd"[w] + " gone for good", (lanes, recs, delayed, limbo, f[:6] + (f[6] | b,), ""), None
            nl, nr, budget, got = lanes, recs, bound, False
            for i in range(len(lanes)):
                els, p = nl[i]
                pos, start = p[w], p[w]
                while pos < len(els) and budget and not got:
                    t, cap, taken = el = els[pos] if pos >= 0 else els[0]
                    budget -= 1
                    pos += 1
                    st, cr, ho = nr[t]
                    if live(el, nr, wait) and (not ask_record or not (cr | ho) & b):
                        els = put(pos - 1, els, (t, cap, taken + (room == "element")))
                        nr = put(t, nr, (st, cr, ho | b))
                        got = True
                if advance == "always" or got:
                    p = put(w, p, pos)
                nl = put(i, nl, trim((els, p), nr, wait))
                if got or not budget:
                    break
            yield "claim " + "abcd"[w], (nl, nr, delayed, limbo, f, ""), b
            for t in range(T):
                st, cr, ho = recs[t]
                if not ho & b or st != "L":
                    continue
                who = "%s t%d" % ("abcd"[w], t)
                twice = "G2: %s credited twice" % who if cr & b else ""
                n = ("F" if bits(cr | b) >= nums[t] and enqueue_check else "L", cr | b, ho & ~b)
                nr = put(t, recs, n)
                yield "complete " + who, (tuple(trim(l, nr, wait) for l in lanes), nr, delayed, limbo, f, twice), b
                if f[0]:
                    nr = put(t, recs, (st, cr, ho & ~b))
                    if expiry == "one_step":
                        yield "give up/expire " + who, (lanes, nr, put(t, delayed, delayed[t] + 1), limbo, fault(f, 0), ""), None
                    else:
                        yield "expire " + who, (lanes, nr, delayed, put(t, limbo, limbo[t] + 1), fault(f, 0), ""), None
        for t in range(T):
            if limbo[t]:
                yield "expiration record of t%d handled, acknowledged" % t, \
                    (lanes, recs, put(t, delayed, delayed[t] + 1), put(t, limbo, limbo[t] - 1), f, ""), 0
                if f[1]:
                    yield "expiration record of t%d handled, killed before ack" % t, \
                        (lanes, recs, put(t, delayed, delayed[t] + 1), limbo, fault(f, 1), ""), None
            if delayed[t]:
                nl = push(lanes, 0, (t, 1, 0)) if recs[t][0] == "L" else lanes
                yield "backoff of t%d over" % t, (nl, recs, put(t, delayed, delayed[t] - 1), limbo, f, ""), 0
            if f[2]:
                nl = lanes if enqueue_check else push(lanes, 1, (t, nums[t], 0))
                yield "pipeline delivers t%d again (new offset)" % t, (nl, recs, delayed, limbo, fault(f, 2), ""), None
            if f[4] and recs[t][0] == "L":
                nr = put(t, recs, ("X", recs[t][1], 0))
                yield "cancel t%d" % t, (tuple(trim(l, nr, wait) for l in lanes), nr, delayed, limbo, fault(f, 4), ""), None
        if f[3]:
            for i in range(len(lanes)):
                for w in range(W):
                    yield "forget P[%s]" % "abcd"[w], \
                        (put(i, lanes, (lanes[i][0], put(w, lanes[i][1], 0))), recs, delayed, limbo, fault(f, 3), ""), None
        if f[5]:
            nr = tuple((st, cr, 0) for st, cr, _ in recs)
            els = tuple((t, nums[t] - bits(cr), 0) for t, (st, cr, _) in enumerate(nr) if st == "L")
            yield "FLUSHALL and rebuild from SQL", ((((), zero), (els, zero)), nr, (0,) * T, (0,) * T, fault(f, 5), ""), None

    def invariant(s):
        lanes, recs, delayed, limbo, f, note = s
        if note:
            return note
        for t, (st, cr, ho) in enumerate(recs):
            if bits(cr) > nums[t]:
                return "G3: t%d has %d completions, NUM=%d" % (t, bits(cr), nums[t])
            if st == "L":
                if room == "record":      # kept by construction; the liveness check says whether somebody can still reach it
                    if bits(cr) + bits(ho) + delayed[t] + limbo[t] > nums[t]:
                        return "G3: t%d has more replicas out than NUM" % t
                    continue
                out = sum(e[1] - e[2] for els, _ in lanes for e in els if e[0] == t) + bits(ho) + delayed[t] + limbo[t]
                if out + bits(cr) < nums[t]:
                    return "G1: t%d lost a replica (%d of %d left)" % (t, out + bits(cr), nums[t])
                if out + bits(cr) > nums[t]:
                    return "G3: t%d has %d replicas out for %d" % (t, out + bits(cr), nums[t])
        for els, p in lanes:
            if clamp and not reset_c and any(x > len(els) for x in p):
                return "pointer beyond the head"
        return None

    goal = lambda s: all(r[0] != "L" for r in s[1])
    sets = [(1 << W) - 1]
    return init, actions, invariant, goal, sets


# ------------------------------------------------------------------ model 2: SQL, filter, bus, Redis, results (design 2)
# One key, found by two discovery processes; two workers; the queue is a number of open replicas.
# state: (disc, sql, filt, log, fan, Kafka commit, redis, last fsync, task-results, OK answers per worker, faults, rebuild, fences known, note)
# Not modelled: a forwarder frozen across a FLUSHALL, two shards, the time between an SQL read and the script that follows.
def flow(num=1, W=2, crash=1, zombie=0, flush=0, rollback=0, resend=1, record=True, tombstone=True, sql_check=True, cas=True,
         by_offset=True, barrier=True, settle_cap=True, durable_first=True, maxlog=3, walk=False, walk_again=True, place="behind",
         direct=False, fence=True):
    """sql  (row state 0 none 1 unpublished 2 published, offset of last publish or -1, credited mask)
    log     tuple of 0/1/2: 1 = record flagged `again`; 2 = a record of a rebuild that is not
    rebuild 0 none, 1 the shard is open and marked, 2 + o its task is published at o (walk=False: a rebuild is one step)
    fan     tuple of consumer positions (second one is the zombie)
    redis   (stored offset, record 0 none 1 live 2 final, open, holders, credited, results outbox, fence)
    direct  a discovery process may enqueue what it stored past the bus (pc 6 follows), with the fence that it knew before"""
    R0 = (-1, 0, 0, 0, 0, 0, 0)
    init = ((0, 0), (0, -1, 0), 0, (), (0, 0), 0, R0, None, 0, (0,) * W, (crash, zombie, flush, rollback, resend), 0, (0, 0), "")

    def fault(f, i):
        return f[:i] + (f[i] - 1,) + f[i + 1:]

    def actions(s):
        disc, sql, filt, log, fan, comm, red, snap, bus, oks, f, reb, cap, note = s
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(
            ("disc", "sql", "filt", "log", "fan", "comm", "red", "snap", "bus", "oks", "f", "reb", "cap", "note"), s))
        row, off, cred = sql
        final = bits(cred) >= num
        # discovery processes: 0 read filter, 1 insert, 2 publish, 3 mark published, 4 mark filter, 5 commit, 9 done
        for d in (0, 1):
            pc = disc[d]
            go = lambda v: tuple(v if i == d else x for i, x in enumerate(disc))
            n = "D%d " % d
            if pc == 0:
                yield n + "reads the filter", S(disc=go(5 if filt else 1)), 0
            elif pc == 1:
                knows = tuple(red[6] if i == d else x for i, x in enumerate(cap)) if direct else cap
                yield n + "INSERT IGNORE", (S(disc=go(2), sql=(1, -1, 0), cap=knows) if not row else S(disc=go(4))), 0
            elif pc == 2:
                if len(log) < maxlog:
                    yield n + "publishes", S(disc=go(3), log=log + (0,)), 0
                if direct and fence and cap[d] != red[6]:
                    if len(log) < maxlog:
                        yield n + "is refused by the fence, publishes `again`", S(disc=go(3), log=log + (1,)), 0
                elif direct:
                    nr = red if record and red[1] else (red[0], 1, red[2] + num) + red[3:]
                    yield n + "enqueues past the bus", S(disc=go(6), red=nr), 0
                    if f[0] and len(log) < maxlog:
                        yield n + "enqueues past the bus, loses the answer, publishes `again`", \
                            S(disc=go(3), red=nr, log=log + (1,), f=fault(f, 0)), None
            elif pc == 6:
                yield n + "marks published before all records", S(disc=go(4), sql=(2, off, cred)), 0
            elif pc == 3:
                o = len(log) - 1 if by_offset else 0
                yield n + "marks published", S(disc=go(4), sql=(2, max(off, o), cred)), 0
            elif pc == 4:
                yield n + "marks the filter", S(disc=go(5), filt=1), 0
            elif pc == 5:
                yield n + "commits its input", S(disc=go(9)), 0
            if f[0] and 0 < pc < 9:
                yield n + "is killed, input comes again", S(disc=go(0), f=fault(f, 0)), None
        if row == 1 and not any(x in (2, 3, 6) for x in disc) and len(log) < maxlog:
            if not (sql_check and final):
                yield "watchdog republishes the unpublished row and marks it", S(sql=(2, len(log), cred), log=log + (1,)), 0
                if f[0]:
                    yield "watchdog republishes, is killed before the mark", S(log=log + (1,), f=fault(f, 0)), None
            else:
                yield "watchdog marks the finished row published", S(sql=(2, off, cred)), 0
        if row == 1 and (2 in disc or 6 in disc) and f[4] and len(log) < maxlog:
            yield "watchdog republishes while the publisher is still at it", S(log=log + (1,), sql=(2, len(log), cred), f=fault(f, 4)), None
        stored, rec, opn, hold, rc, outb, fen = red
        # the walk of a rebuild; the reconciler comes behind it
        if reb == 1:
            at = len(log) + (place == "first")
            if row != 2 or final:
                yield "rebuild has nothing to publish", S(reb=0), 0
            elif place == "first" and off < len(log):
                yield "rebuild stores a place", S(sql=(row, len(log), cred)), 0
            elif len(log) < maxlog:
                yield "rebuild publishes the task", S(log=log + (1 if walk_again else 2,), reb=2 + at), 0
        if reb > 1:
            yield "rebuild stores the place, takes the mark away", S(sql=(row, max(off, reb - 2), cred) if place == "behind" else sql, reb=0), 0
        if reb and f[0]:
            yield "rebuild is killed", S(reb=1 if place == "behind" else 0, f=fault(f, 0)), None
        # reconciler
        if row == 2 and not final and rec == 0 and not reb and len(log) < maxlog:
            if by_offset:
                missing = stored >= off and (off >= 0 or direct)
            else:
                missing = True
            if missing:
                yield "reconciler republishes the task missing in Redis", S(log=log + (1,), sql=(2, len(log), cred)), 0
        # fanout
        for c in range(2):
            if c == 1 and not f[1] and fan[1] == 0:
                continue
            if fan[c] < len(log):
                o = fan[c]
                nf = tuple(o + 1 if i == c else x for i, x in enumerate(fan))
                who = "fanout " if c == 0 else "zombie fanout "
                if cas and stored < o - 1:
                    yield who + "refused (gap), seeks back", S(fan=tuple(stored + 1 if i == c else x for i, x in enumerate(fan))), 0
                elif o <= stored:
                    yield who + "offset %d ignored" % o, S(fan=nf), (0 if c == 0 else None)
                else:
                    asks = sql_check and log[o] < 2
                    if (record and rec) or (asks and log[o] and final):
                        nr = (o, rec, opn, hold, rc, outb, fen)
                    else:
                        nr = (o, 1, opn + num - (bits(cred) if asks else 0), hold, rc | (cred if asks else 0), outb,
                              fen + 1 if direct and log[o] == 1 else fen)
                    yield who + "enqueues offset %d" % o, S(fan=nf, red=nr), (0 if c == 0 else None)
        if cas and stored < fan[0] - 1 and fan[0] == len(log):
            yield "owner compares its place with the stored offset, seeks back", S(fan=(stored + 1, fan[1])), 0
        if comm < fan[0]:
            yield "Kafka commit %d" % fan[0], S(comm=fan[0]), (None)
        if f[0] and fan[0] > comm:
            yield "fanout killed, restarts at commit", S(fan=(comm, fan[1]), f=fault(f, 0)), None
        if f[1]:
            yield "a zombie consumer wakes at the commit", S(fan=(fan[0], comm), f=fault(f, 1)), None
        # workers
        for w in range(W):
            b = 1 << w
            if opn and rec == 1 and not (hold | rc) & b:
                yield "claim " + "ab"[w], S(red=(stored, rec, opn - 1, hold | b, rc, outb, fen)), 0
            if hold & b:
                if rec == 1 and bits(rc) < num:
                    fin = bits(rc | b) >= num
                    nr = (stored, (2 if tombstone else 0) if fin else 1, opn, hold & ~b, (rc | b) if (tombstone or not fin) else 0, outb | b, fen)
                    if not tombstone and fin:
                        nr = (stored, 0, opn, hold & ~b, 0, outb | b, fen)
                    no = tuple(x + 1 if i == w else x for i, x in enumerate(oks))
                    yield "complete " + "ab"[w] + " OK", S(red=nr, oks=no), 0
                else:
                    yield "complete " + "ab"[w] + " refused", S(red=(stored, rec, opn, hold & ~b, rc, outb, fen)), 0
            if outb & b:
                if not durable_first or snap is None:
                    yield "forwarder publishes result of " + "ab"[w], S(bus=bus | b, red=(stored, rec, opn, hold, rc, outb & ~b, fen)), 0
                    yield "forwarder publishes result of %s, killed before XDEL" % "ab"[w], S(bus=bus | b), None
            if bus & b:
                nc = cred | b
                if settle_cap and bits(nc) > num:
                    nc = cred
                nr = red
                if bits(nc) >= num and rec == 2 and tombstone and not outb:
                    nr = (stored, 0, 0, 0, 0, 0, fen)
                elif rec == 1:
                    nr = (stored, 1, opn, hold, rc, outb, fen)
                yield "result of %s stored in SQL" % "ab"[w], S(sql=(row, off, nc), bus=bus & ~b, red=nr), 0
        # Redis faults
        if f[3] and snap is None:
            yield "(last fsync)", S(snap=red), None
        if snap is not None:
            yield "(fsync)", S(snap=None), 0
            yield "Redis crashes, comes back at the last fsync", \
                S(red=snap, snap=None, f=fault(f, 3), oks=tuple((snap[4] | cred) >> i & 1 for i in range(W))), None   # answers not on disk are void
        if f[2] and red != R0:
            ok = not barrier or not (bus)
            if ok:
                left = num - bits(cred)
                # rebuild from SQL: unfinished rows, offsets as of the log's end where they are rebuilt
                void = tuple(cred >> i & 1 for i in range(W))
                gen = fen + 1 if direct else fen          # the generation is in the fence
                nr = (len(log) - 1, 1, left, 0, cred, 0, gen) if row == 2 and left else (len(log) - 1 if barrier else -1, 0, 0, 0, 0, 0, gen)
                if walk:
                    nr = (len(log) - 1, 0, 0, 0, 0, 0, gen)
                    yield "FLUSHALL, the shard is marked and open", S(red=nr, snap=None, f=fault(f, 2), oks=void, reb=1), None
                else:
                    yield "FLUSHALL, rebuild from SQL", S(red=nr, snap=None, f=fault(f, 2), oks=void), None

    def invariant(s):
        disc, sql, filt, log, fan, comm, red, snap, bus, oks, f, reb, cap, note = s
        if filt and not sql[0]:
            return "G4: key marked as seen, task not stored"
        if any(x > 1 for x in oks):
            return "G2: a worker was answered OK twice"
        if sum(oks) > num:
            return "G3: %d completions answered OK, NUM=%d" % (sum(oks), num)
        if bits(sql[2]) > num:
            return "G3: %d credited in SQL, NUM=%d" % (bits(sql[2]), num)
        return None

    goal = lambda s: bits(s[1][2]) >= num
    return init, actions, invariant, goal, [0]


# ------------------------------------------------------------------ model 3: `pipeline` on a Redis Streams consumer group
def streams(n=2, owner=False):
    """n entries; two consumers of one group; the script ignores offsets at or below the stored one, then the entry is acknowledged."""
    init = (0, ((), ()), -1, 0, 0, 1)   # last delivered, pending per consumer, stored, enqueued mask, acked mask, kills

    def actions(s):
        last, pend, stored, enq, ack, kills = s
        for c in (0, 1):
            if owner:
                if c == 0 and stored + 1 < n:
                    yield "owner enqueues entry %d (XRANGE after the stored one)" % (stored + 1), \
                        (last, pend, stored + 1, enq | 1 << stored + 1, ack | 1 << stored + 1, kills), 0
                continue
            if last < n:
                yield "consumer %d reads entry %d" % (c, last), (last + 1, tuple(p + (last,) if i == c else p for i, p in enumerate(pend)), stored, enq, ack, kills), 0
            if pend[c]:
                e = pend[c][0]
                rest = tuple(p[1:] if i == c else p for i, p in enumerate(pend))
                if e > stored:
                    yield "consumer %d enqueues entry %d, acks" % (c, e), (last, rest, e, enq | 1 << e, ack | 1 << e, kills), 0
                else:
                    yield "consumer %d: entry %d is below the stored offset, ignored, acked" % (c, e), (last, rest, stored, enq, ack | 1 << e, kills), 0
            if kills and pend[c]:
                yield "consumer %d dies, XAUTOCLAIM gives its entries to %d" % (c, 1 - c), \
                    (last, tuple(pend[1 - c] + pend[c] if i == 1 - c else () for i in (0, 1)), stored, enq, ack, kills - 1), None

    inv = lambda s: "G1: an entry acknowledged and never enqueued" if s[4] & ~s[3] else None
    return init, actions, inv, lambda s: s[3] == (1 << n) - 1, [0]


# ------------------------------------------------------------------ model 4: a dead task is sent again
# One task of one worker, which may fail it or complete it. Its lives count from 0: the task's epoch.
# state: (sql, epoch, outbox row, log, read, record, deaths, done, faults, truly, lane)
#  sql     U unfinished, D dead, F completed           log     pipeline: how often a record was published; read of them
#  record  None, or (L live | D dead | F completed, epoch, offer)   deaths  reports of a death on the bus, with their epochs
#  done    a report of a completion is on the bus      truly   epochs in which the record really died
#  lane    the offers of the elements of the task that are in a lane: those that count no more stay as long as they like
# by_epoch: the first offer of a life is higher than each of the lives before. Otherwise it is 0 where no record is known, and
# the next one where a final record is. Offer 0 in a record: each element counts.
def again(lives=2, repeats=1, fails=2, settle_asks=True, enqueue_replaces=True, by_epoch=True):
    init = ("U", 0, 1, 0, 0, None, (), 0, (lives, repeats, fails), (), ())

    def counting(rec, lane):
        return [offer for offer in lane if rec[2] in (0, offer)]

    def actions(s):
        sql, epoch, out, log, read, rec, deaths, done, (lives, repeats, fails), truly, lane = s
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(
            ("sql", "epoch", "out", "log", "read", "rec", "deaths", "done", "f", "truly", "lane"), s))
        for i, offer in enumerate(lane):
            if not rec or rec[0] != "L" or offer not in counting(rec, lane):
                yield "a spent element leaves its lane", S(lane=lane[:i] + lane[i + 1:]), None
        if out:
            yield "watchdog publishes the row and marks it", S(out=0, log=log + 1), 0
            if repeats:
                yield "watchdog publishes the row, is killed before the mark", S(log=log + 1, f=(lives, repeats - 1, fails)), None
        if read < log:
            # The record is flagged `again`: fanout asks SQL for the status and the epoch.
            if sql != "U":
                yield "fanout drops a record of a final task", S(read=read + 1), 0
            elif rec is None or enqueue_replaces and rec[0] != "L" and rec[1] < epoch:
                first = 10 * epoch if by_epoch else rec[2] + 1 if rec else 0
                yield "fanout enqueues epoch %d" % epoch, S(read=read + 1, rec=("L", epoch, first), lane=lane + (first,)), 0
            else:
                yield "fanout ignores a task that has a record", S(read=read + 1), 0
        if rec and rec[0] == "L":
            if fails:
                yield "epoch %d dies" % rec[1], S(rec=("D",) + rec[1:], deaths=deaths + (rec[1],), truly=truly + (rec[1],),
                                                  f=(lives, repeats, fails - 1)), None
                yield "epoch %d is offered once more" % rec[1], S(
                    rec=("L", rec[1], rec[2] + 1), lane=lane + (rec[2] + 1,), f=(lives, repeats, fails - 1)), None
            yield "epoch %d is completed" % rec[1], S(rec=("F",) + rec[1:], done=1), 0
        if deaths:
            e = deaths[0]
            counts = sql == "U" and (e >= epoch or not settle_asks)
            after = "D" if counts else sql
            yield "the death of epoch %d is settled" % e, S(sql=after, out=0 if counts else out, deaths=deaths[1:]), 0
            if repeats:
                yield "the death of epoch %d is settled, the reader is killed before the commit" % e, \
                    S(sql=after, out=0 if counts else out, f=(lives, repeats - 1, fails)), None
        if done:
            yield "the completion is settled", S(sql="F" if sql == "U" else sql, out=0 if sql == "U" else out, done=0), 0
        if rec and rec[0] != "L" and sql != "U":
            yield "the final record is forgotten", S(rec=None), None
        if sql == "D" and lives:
            yield "an operator sends the task again", S(sql="U", epoch=epoch + 1, out=1, f=(lives - 1, repeats, fails)), None

    def invariant(s):
        sql, epoch, rec, truly, lane = s[0], s[1], s[5], s[9], s[10]
        if sql == "D" and epoch not in truly:
            return "SQL says dead in epoch %d, in which the task has not died" % epoch
        if rec and rec[0] == "L" and len(counting(rec, lane)) != 1:
            return "%d elements count for one task" % len(counting(rec, lane))
        return None

    # Without an operator a dead task stays dead. Nothing may stop a task on its way to an end.
    return init, actions, invariant, lambda s: s[0] != "U", [0]


# ------------------------------------------------------------------ model 5: a task is cancelled
# One task of one worker. An operator's process cancels it; the watchdog takes over what a killed process left.
# state: (sql, wish, caller, dog, out, log, read, record, done, ok, told, faults)
#  sql     U unfinished, F completed, X cancelled      wish    the row of `changes`
#  caller  0 not yet, 1 the wish is stored, X or F: the script has answered so, 9 over; dog: the same of the watchdog
#  log     pipeline: per record, 1 where the fanout asks SQL; read of them   record  None, L live, F completed, X cancelled
#  done    a report of a completion is on the bus      ok      a worker was answered OK   told    the answer to the operator
def cancel(kills=1, repeats=1, flush=1, maxlog=3, script_decides=True, final_for_absent=True, wish_until_sql=True, old_are_asked=True,
           generation_asked=True, never_lost=True):
    init = ("U", 0, 0, 0, 1, (), 0, None, 0, 0, "", (kills, repeats, flush))

    def actions(s):
        sql, wish, caller, dog, out, log, read, rec, done, ok, told, (kills, repeats, flush) = s
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(
            ("sql", "wish", "caller", "dog", "out", "log", "read", "rec", "done", "ok", "told", "f"), s))
        if out and len(log) < maxlog:
            yield "publisher publishes and marks", S(out=0, log=log + (out - 1,)), 0
            if repeats:
                yield "publisher publishes, is killed before the mark", S(out=2, log=log + (out - 1,), f=(kills, repeats - 1, flush)), None
        if read < len(log):
            if log[read] and sql != "U":
                yield "fanout drops a record of a final task", S(read=read + 1), 0
            elif rec is None:
                yield "fanout enqueues", S(read=read + 1, rec="L"), 0
            else:
                yield "fanout ignores a task that has a record", S(read=read + 1), 0
        if rec == "L":
            yield "a worker completes", S(rec="F", done=1, ok=1), 0
        if done:
            yield "the completion is settled", S(sql="F" if sql == "U" else sql, out=0 if sql == "U" else out, done=0), 0

        def script():
            if rec == "F":
                return "F", rec
            return "X", rec if rec is None and not final_for_absent else "X"

        def settle(answer):
            if answer == "X" and sql == "U":
                return dict(sql="X", out=0, wish=0)
            return dict(wish=0)

        if caller == 0:
            if sql != "U":
                yield "an operator cancels a final task", S(caller=9), 0
            elif script_decides:
                yield "an operator cancels: the wish is in SQL", S(wish=1, caller=1), 0
            else:
                yield "an operator cancels: SQL says cancelled", S(wish=1, caller=1, sql="X", out=0), 0
        if caller == 1:
            answer, after = script()
            if wish_until_sql:
                yield "the script answers %s" % answer, S(caller=answer, rec=after), 0
            else:
                yield "the script answers %s, and so is the operator" % answer, S(caller=answer, rec=after, wish=0, told=answer), 0
        if caller in ("X", "F"):
            now = settle(caller)
            yield "SQL has the end, and the operator the answer", S(caller=9, told="X" if now.get("sql", sql) == "X" else "F", **now), 0
        if kills and caller in (1, "X", "F"):
            yield "the operator's process is killed", S(caller=9, f=(kills - 1, repeats, flush)), None
        if wish and not dog and caller == 9:
            answer, after = script()
            yield "watchdog: the script answers %s" % answer, S(dog=answer, rec=after), 0
        if dog:
            yield "watchdog: SQL has the end", S(dog=0, **settle(dog)), 0
            if kills:
                yield "the watchdog is killed", S(dog=0, f=(kills - 1, repeats, flush)), None
        if rec in ("F", "X") and sql != "U":
            # A grace time later. Until then a record of the bus that is not asked about was enqueued, or is old by now.
            asked = lambda flag: 1 if old_are_asked else flag
            yield "the final record is forgotten", S(rec=None, log=tuple(asked(x) for x in log), out=out and asked(out - 1) + 1), None
        if rec == "X" and sql == "U" and never_lost:
            yield "watchdog: the record says cancelled, and so does SQL", S(sql="X", out=0), None
        if rec == "X" and sql == "U" and not never_lost and not done and len(log) < maxlog:
            yield "the report counts as lost: the task is published again", S(rec=None, log=log + (1,)), None
        if flush and not done and rec is not None:
            more = (1,) if sql == "U" and len(log) < maxlog else ()
            if sql != "U" or more:
                # What a script answered in the generation before does not reach SQL. The shard counts what was on the bus
                # as read. The processes start over, and the watchdog publishes what they had not.
                again = lambda at, first: first if at == "X" and generation_asked else at
                yield "FLUSHALL, rebuilt from SQL", S(rec=None, log=log + more, read=len(log), out=out and 2,
                                                      caller=again(caller, 1), dog=again(dog, 0),
                                                      f=(kills, repeats, flush - 1)), None

    def invariant(s):
        sql, rec, ok, told = s[0], s[7], s[9], s[10]
        if told == "X" and (sql != "X" or rec in ("L", "F")):
            return "the operator was told that the task is cancelled, and it lives"
        if ok and sql == "X":
            return "a worker was answered OK, and SQL says cancelled"
        return None

    return init, actions, invariant, lambda s: s[0] != "U" and not s[1], [0]


# ------------------------------------------------------------------ model 6: an operator changes and requeues a live task
# One task, W workers, two lanes by priority. Only the newest element of the task offers what is left, and each worker has a
# pointer into each lane. The operator gives the task another NUM or priority, requeues it, away from a worker, or to one.
# state: (lanes, status, NUM, credited, held, waiting, refused, reserved, priority, gone, left of the operator's acts and of failures)
#  lanes    ((elements, pointers), ...) element 1: the newest, 0: an older one     refused   mask: a failure too many, or taken away
#  reserved the only worker that may get it, or -1; it ends by itself where `timed`
#  gone     a worker that never comes back: its leases run out
# rests: a worker may give back what it has not started, once. It rests: others may have the task at once, and this worker a
# moment later. Its pointer stays before an element from which it rests: nothing offers the task to it once more.
# Of a state with rests, the last part has the mask of those that rest, too.
def live(W=3, num=2, acts=2, fails=1, what=("num", "priority", "all", "away", "to"), timed=False, change_offers=True, requeue_offers=True,
         free_offers=True, closes_excess=True, ends_with_worker=True, all_lifts=True, leaves=False, rests=0, rest_stays=True):
    init = ((((1,), (0,) * W), ((), (0,) * W)), "L", num, 0, 0, 0, 0, -1, 0, 0, (acts, fails)) + ((rests, 0),) * (rests > 0)

    def left(s):
        return s[2] - bits(s[3]) - bits(s[4]) - s[5] if s[1] == "L" else 0

    def trimmed(s):
        def trim(lane):
            els, p = lane
            k = 0
            while k < len(els) and (not els[k] or left(s) <= 0):
                k += 1
            return els[k:], tuple(max(x - k, 0) for x in p)
        return (tuple(trim(lane) for lane in s[0]),) + s[1:]

    def offered(s, offers=True):
        if not offers or left(s) <= 0:
            return trimmed(s)
        lanes = [(tuple(0 for _ in els), p) for els, p in s[0]]
        els, p = lanes[s[8]]
        lanes[s[8]] = (els + (1,), p)
        return trimmed((tuple(lanes),) + s[1:])

    def resting(s):
        return s[11] if len(s) > 11 else (0, 0)

    def may_soon(s, w):
        return left(s) > 0 and not (s[3] | s[4] | s[6]) >> w & 1 and s[7] in (-1, w)

    def may(s, w):
        return may_soon(s, w) and not resting(s)[1] >> w & 1

    def actions(s):
        lanes, st, num, cr, ho, wait, refused, reserved, prio, gone, (acts, fails) = s[:11]
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(
            ("lanes", "st", "num", "cr", "ho", "wait", "refused", "reserved", "prio", "gone", "f", "rests"), s))
        left_to_give, resters = resting(s)
        if st != "L":
            return
        for w in range(W):
            b, who = 1 << w, "abcd"[w]
            if gone & b:
                if ho & b:
                    yield "the lease of %s runs out" % who, trimmed(S(ho=ho & ~b, wait=wait + 1)), 0
                continue
            if leaves and not gone:
                yield who + " is gone for good", S(gone=b), None
            nl, took = list(lanes), False
            for i, (els, p) in enumerate(nl):
                pos, stays = p[w], None
                while pos < len(els) and not took:
                    took = bool(els[pos]) and may(s, w)
                    if els[pos] and not took and may_soon(s, w) and rest_stays and stays is None:
                        stays = pos
                    pos += 1
                nl[i] = (els, p[:w] + (pos if stays is None else stays,) + p[w + 1:])
                if took:
                    break
            yield "claim " + who, trimmed(S(lanes=tuple(nl), ho=ho | b if took else ho)), b
            if ho & b:
                n = S(cr=cr | b, ho=ho & ~b)
                if bits(cr | b) >= num:
                    n = S(cr=cr | b, ho=ho & ~b, st="F", wait=0)
                elif reserved == w and ends_with_worker:
                    # What is left comes back by way of the backoffs, in a new element.
                    n = S(cr=cr | b, ho=ho & ~b, reserved=-1, wait=wait + (left(n) > 0))
                yield "complete " + who, trimmed(n), b
                if left_to_give:
                    yield who + " gives it back", offered(S(ho=ho & ~b, rests=(left_to_give - 1, resters | b))), None
                if fails:
                    yield who + " fails", trimmed(S(ho=ho & ~b, wait=wait + 1, f=(acts, fails - 1))), None
                    if num > 1:
                        free = reserved == w and ends_with_worker
                        yield who + " fails too often", trimmed(S(
                            ho=ho & ~b, wait=wait + 1, refused=refused | b, reserved=-1 if free else reserved, f=(acts, fails - 1))), None
        if wait:
            yield "a backoff is over", offered(S(wait=wait - 1)), 0
        if resters:
            yield "the rest is over", S(rests=(left_to_give, 0)), 0
        if reserved >= 0 and timed:
            yield "the reservation is over", offered(S(reserved=-1), free_offers), 0
        every = (1 << W) - 1
        lifted = 0 if all_lifts else refused
        if left(s) > 0 and reserved < 0 and not ho and not wait and (cr | refused | gone) == every:
            yield "nobody may have it: the operator requeues it", offered(S(refused=lifted), requeue_offers), 0
        if not acts:
            return
        f = (acts - 1, fails)
        if "num" in what:
            for n in range(1, W + 1):
                if n == num:
                    continue
                h, x = ho, wait
                while closes_excess and bits(cr) + bits(h) + x > n and (h or x):
                    h, x = (h, x - 1) if x else (h & ~(1 << h.bit_length() - 1), x)
                if bits(cr) >= n:
                    yield "NUM %d" % n, trimmed(S(num=n, ho=0, wait=0, st="F", f=f)), None
                else:
                    yield "NUM %d" % n, offered(S(num=n, ho=h, wait=x, f=f), change_offers), None
        if "priority" in what:
            yield "the other priority", offered(S(prio=1 - prio, f=f), change_offers), None
        if "all" in what:
            yield "requeue", offered(S(ho=0, wait=0, reserved=-1, refused=lifted, f=f), requeue_offers), None
        for w in range(W):
            b, who = 1 << w, "abcd"[w]
            if "away" in what:
                yield "requeue away from " + who, offered(S(
                    ho=ho & ~b, refused=refused | b, reserved=-1 if reserved == w else reserved, f=f), requeue_offers), None
            if "to" in what and not cr & b:
                yield "requeue to " + who, offered(S(ho=0, wait=0, refused=refused & ~b, reserved=w, f=f), requeue_offers), None

    def invariant(s):
        out = bits(s[3]) + bits(s[4]) + s[5]
        if s[1] == "L" and out > s[2]:
            return "G3: %d replicas out or credited, NUM=%d" % (out, s[2])
        return "G2: a credited worker holds it" if s[3] & s[4] else None

    return init, actions, invariant, lambda s: s[1] != "L", [(1 << W) - 1]


# ------------------------------------------------------------------ model 7: two changes of one task at once
# SQL and the queue have a NUM each. Two processes give the task another one: each stores it with a wish, tells the queue, and
# ends its wish. The watchdog carries out a wish that stays, and no call of a process takes as long as it waits (two seconds).
# state: (SQL, queue, wish, second, callers, kills)
#  wish     None, or whose turn it is: 0 and 1 of the callers, 2 of a comparison    second  the wish replaced one that was there
#  callers  per process: 0 not yet, 1 the wish is stored, 2 the script has run, 9 over
# slow: that is not so.
def two_changes(kills=1, compares=True, second_stays=True, slow=False):
    init = (0, 0, None, (False, False), (0, 0), kills)

    def actions(s):
        sql, queue, wish, second, callers, kills = s
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(("sql", "queue", "wish", "second", "callers", "f"), s))
        put = lambda tup, i, v: tup[:i] + (v,) + tup[i + 1:]
        for i in (0, 1):
            who, pc, go = "AB"[i], callers[i], lambda v, i=i: put(callers, i, v)
            if pc == 0:
                yield who + " stores its NUM and a wish", S(sql=i + 1, wish=i, second=put(second, i, wish is not None), callers=go(1)), 0
            elif pc == 1:
                yield who + " tells the queue", S(queue=i + 1, callers=go(2)), 0
            elif pc == 2:
                left = wish if wish != i or second[i] and second_stays else None
                if compares and sql != i + 1:
                    left = 2
                yield who + " ends its wish", S(wish=left, callers=go(9)), 0
            if kills and pc in (1, 2):
                yield who + " is killed", S(callers=go(9), f=kills - 1), None
        if wish is not None and (slow or not any(pc in (1, 2) for pc in callers)):
            yield "the watchdog tells the queue what SQL has", S(queue=sql, wish=None), 0

    def invariant(s):
        sql, queue, wish, second, callers, _ = s
        if wish is None and callers == (9, 9) and sql != queue:
            return "SQL has NUM %d, the queue %d, and nobody knows" % (sql, queue)
        return None

    return init, actions, invariant, lambda s: s[4] == (9, 9) and s[2] is None, [0]


# ------------------------------------------------------------------ model 8: a task is reserved twice
# SQL keeps the end of a reservation as an alarm. Two operators reserve the task, each until a time or without an end (NEVER).
# state: (clock, queue, alarm, callers, kills)
#  queue    None, or until when the task is reserved     alarm  None, or when the watchdog asks the queue
#  callers  per operator: 0 not yet, 1 the alarm is stored, 9 over
# The watchdog leaves an alarm alone for two seconds behind its time, and no call takes as long.
def two_reservations(ends=(1, 2), kills=1, earlier_stays=True, queue_knows=True, waits=True):
    NEVER, LAST = 9, 3
    init = (0, None, None, (0, 0), kills)

    def actions(s):
        clock, queue, alarm, callers, kills = s
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(("clock", "queue", "alarm", "callers", "f"), s))
        for i in (0, 1):
            who, until, pc = "AB"[i], ends[i], callers[i]
            go = lambda v, i=i: callers[:i] + (v,) + callers[i + 1:]
            if pc == 0:
                kept = min(until, max(alarm, clock)) if alarm is not None and earlier_stays else until
                yield who + " stores the end", S(alarm=alarm if until == NEVER else kept, callers=go(1)), 0
            elif pc == 1:
                yield who + " reserves the task", S(queue=until, callers=go(9)), 0
                if kills:
                    yield who + " is killed", S(callers=go(9), f=kills - 1), None
        if clock < LAST:
            yield "time passes", S(clock=clock + 1), 0
        if alarm is not None and alarm <= clock:
            if queue is not None and queue <= clock:
                yield "watchdog: the reservation is over", S(queue=None), 0
            elif not waits or not any(pc == 1 for pc in callers):
                if queue is None:
                    yield "watchdog: the task is not reserved", S(alarm=None), 0
                elif queue_knows:
                    yield "watchdog: it ends later", S(alarm=None if queue == NEVER else queue), 0

    def invariant(s):
        clock, queue, alarm, callers, _ = s
        if queue not in (None, NEVER) and (alarm is None or alarm > max(queue, clock)):
            return "reserved until %d, and the watchdog asks %s" % (queue, "never" if alarm is None else "at %d" % alarm)
        return None

    return init, actions, invariant, lambda s: s[0] == LAST and s[2] is None and s[1] in (None, NEVER), [0]


# ------------------------------------------------------------------ model 9: a task that waited for room goes into the queue, past the bus
# One task of one worker waits in SQL. Two watchdogs may release it, each held up at any step; a call may come late, after its sender was killed.
# The process that stored it is held up, too: it never was on the bus, or a queue that was full turned its record away.
# state: (sql, waits, record, forgets, done, report, dogs, late, kills)
#  sql  U unfinished, F completed      waits  its row is in the outbox      record  0 none, 1 live, 2 final      done  completions
#  fence  (how often a task came that may have come before, how often one was forgotten)      held  that process may still call, with the fence (0, …)
#  dogs  per watchdog (step, fence known): 0 idle, 1 the first step done, 2 both: the fence looked at and the row read, 3 the script has run
#  late  the fence with which a call of a killed watchdog is still on its way, or None
def release(kills=2, counts=True, look_first=True, moves=True):
    init = ("U", 1, 0, (0, 0), 0, 0, ((0, None), (0, None)), None, kills, 1)

    def actions(s):
        sql, waits, record, fence, done, report, dogs, late, left, held = s
        S = lambda **k: tuple(k.get(n, v) for n, v in zip(("sql", "waits", "record", "fence", "done", "report", "dogs", "late", "left", "held"), s))
        refused = lambda known: known != fence if counts else known[0] != fence[0]
        enqueued = dict(record=record or 1, fence=(min(fence[0] + (moves and not record), 3), fence[1]))
        for i in (0, 1):
            who, (step, known) = "AB"[i], dogs[i]
            go = lambda *v, i=i: tuple(v if j == i else d for j, d in enumerate(dogs))
            looks, reads = (0, 1) if look_first else (1, 0)
            if step == looks and (waits or step):
                yield who + " looks at the fence", S(dogs=go(step + 1, fence)), 0
            elif step == reads and (waits or step):
                if waits and sql == "U":
                    yield who + " reads the row", S(dogs=go(step + 1, known)), 0
                else:
                    yield who + " finds no row of an unfinished task", S(waits=0, dogs=go(0, None)), 0
            elif step == 2:
                if refused(known):
                    yield who + " is refused", S(dogs=go(0, None)), 0
                else:
                    yield who + " enqueues", S(dogs=go(3, None), **enqueued), 0
            elif step == 3:
                yield who + " marks it", S(waits=0, dogs=go(0, None)), 0
            if left and step:
                yield who + " is killed", S(dogs=go(0, None), left=left - 1), None
                if step == 2 and late is None:
                    yield who + " is killed, and its call is on its way", S(dogs=go(0, None), late=known, left=left - 1), None
        if late is not None:
            yield "the late call arrives", S(late=None, **({} if refused(late) else enqueued)), 0
        if held:
            yield "the process that stored it goes on", S(held=0, record=record or (0 if fence[0] else 1)), 0
        if record == 1:
            yield "a worker completes it", S(record=2, done=min(done + 1, 2), report=1), 0
        if report:
            yield "SQL has the result", S(sql="F", waits=0, report=0), 0
        if record == 2 and sql == "F" and not report:
            yield "Redis forgets it", S(record=0, fence=(fence[0], fence[1] + 1)), 0

    inv = lambda s: "a worker got it after it was done" if s[4] > 1 else None
    goal = lambda s: s[0] == "F" and s[2] == 0 and not s[1] and s[7] is None and not s[9] and all(step == 0 for step, _ in s[6])
    return init, actions, inv, goal, [0]


# ------------------------------------------------------------------ model 10: one limit key: line, places, gate
put = lambda t, i, v: t[:i] + (v,) + t[i + 1:]


class Key:
    """A state that a script works on: one limit key, its tasks, their line, the lanes and the gate."""
    FIELDS = "lanes line recs back offered limit cool hold timer left gone".split()

    def __init__(self, state, rules):
        for name, value in zip(self.FIELDS, state):
            setattr(self, name, value)
        self.rules = rules

    def packed(self, note=""):
        """The state, without what counts no more, and with offers counted from 0: less to search."""
        live = lambda e: self.recs[e[0]][0] == "L" and self.recs[e[0]][3] == e[1]
        self.line = tuple(tuple((t, 0) for t, o in line if live((t, o))) for line in self.line)
        self.lanes = tuple(tuple((t, 0, passed) for t, o, passed in lane if live((t, o))) for lane in self.lanes)
        self.recs = tuple(r[:3] + (0,) for r in self.recs)
        return tuple(getattr(self, name) for name in self.FIELDS) + (note,)

    def leased(self):
        return sum(bits(r[2]) for r in self.recs)

    def rest(self, t):
        """What is left of the task: neither credited nor leased nor in backoff."""
        status, credited, holders, _ = self.recs[t]
        return self.rules["nums"][t] - bits(credited) - bits(holders) - self.back[t] if status == "L" else 0

    def counts(self, t, offer):
        """Whether the element or the entry of the line is the task's newest."""
        return self.rest(t) > 0 and self.recs[t][3] == offer

    def may_start(self):
        return self.leased() < self.limit and not self.cool and not self.hold

    def enter(self, t, foremost=True):
        status, credited, holders, offer = self.recs[t]
        offer += self.rules["new_offer"]
        self.recs = put(self.recs, t, (status, credited, holders, offer))
        self.offered = self.offered - {t}
        p = self.rules["prios"][t]
        line = ((t, offer),) + self.line[p] if foremost else self.line[p] + ((t, offer),)
        self.line = put(self.line, p, line)

    def release(self):
        at_once = lambda: 1 if self.rules["pace"] else self.limit - self.leased()
        for p in range(len(self.line)):
            ahead = lambda: sum(self.rules["prios"][t] <= p for t in self.offered)
            while self.line[p] and self.may_start() and ahead() < at_once():
                (t, offer), rest = self.line[p][0], self.line[p][1:]
                self.line = put(self.line, p, rest)
                if self.counts(t, offer):
                    self.lanes = put(self.lanes, p, self.lanes[p] + ((t, offer, 0),))
                    self.offered = self.offered | {t}
        waits = any(self.counts(t, offer) for line in self.line for t, offer in line)
        if waits and (self.cool and self.rules["timer_for_pace"] or self.hold and self.rules["timer_for_hold"]):
            self.timer = True

    def end(self, t, record, back=0, releases=True):
        """A lease, or the task, is over."""
        self.recs = put(self.recs, t, record)
        self.back = put(self.back, t, 0 if record[0] != "L" else self.back[t] + back)
        if record[0] != "L":
            self.offered = self.offered - {t}
        if releases:
            self.release()

    def claim(self, w):
        """Answers what was wrong with the start, '' if nothing."""
        for p in range(len(self.lanes)):
            k = 0
            while k < len(self.lanes[p]):
                t, offer, passed = self.lanes[p][k]
                status, credited, holders, _ = self.recs[t]
                leave = lambda: put(self.lanes, p, self.lanes[p][:k] + self.lanes[p][k + 1:])
                if passed & w:
                    k += 1
                elif not self.counts(t, offer):
                    self.lanes = leave()
                elif (credited | holders) & w:
                    self.lanes = put(self.lanes, p, put(self.lanes[p], k, (t, offer, passed | w)))
                    k += 1
                    if self.rules["pass_frees"] and t in self.offered:
                        self.offered = self.offered - {t}
                        self.release()
                elif self.rules["gate"] and not self.may_start():
                    self.lanes = leave()
                    if self.rules["gate_puts_back"]:
                        self.enter(t)
                    else:
                        self.offered = self.offered - {t}
                    self.release()
                else:
                    wrong = "" if self.may_start() else "a start in a hold" if self.hold else \
                        "a start too early" if self.cool else "more than the limit at a time"
                    self.lanes, self.offered = leave(), self.offered - {t}
                    self.recs = put(self.recs, t, (status, credited, holders | w, offer))
                    self.cool = self.rules["pace"]
                    if self.rest(t) > 0 and self.rules["rest_enters"]:
                        self.enter(t)
                    self.release()
                    return wrong
        return ""


def key(W=2, nums=(1, 1), prios=None, C=1, pace=True, holds=0, fails=0, cancels=0, requeues=0, lowers=0, raises=0, only=None, **off):
    T = len(nums)
    rules = dict(nums=nums, prios=prios or (0,) * T, pace=pace, new_offer=1, gate=1, gate_puts_back=1, pass_frees=1, rest_enters=1, timer_for_pace=1,
                 timer_for_hold=1, complete_releases=1, expiry_releases=1, cancel_releases=1, raise_releases=1)
    assert set(off) <= set(rules)
    rules.update(off)
    P = max(rules["prios"]) + 1
    s = Key((((),) * P, ((),) * P, tuple(("L", 0, 0, -rules["new_offer"]) for _ in nums), (0,) * T, frozenset(), C, False, False, False,
             (holds, fails, cancels, requeues, lowers, raises), 0), rules)
    for t in range(T):
        s.enter(t, foremost=False)
    s.release()
    init = s.packed()
    name = lambda w, t: "%s t%d" % ("abcd"[w], t)

    def actions(state):
        new = lambda: Key(state[:-1], rules)

        def spent(s, i):
            s.left = put(s.left, i, s.left[i] - 1)
            return s
        s = new()
        for w in range(W):
            b = 1 << w
            if not s.gone & b:
                n = new()
                yield "claim " + "abcd"[w], n.packed(n.claim(b)), b
                if bits(s.gone) < W - max(nums):
                    n = new()
                    n.gone |= b
                    yield "abcd"[w] + " gone for good", n.packed(), None
            for t in range(T):
                status, credited, holders, offer = s.recs[t]
                if status != "L" or not holders & b:
                    continue
                over = ("L", credited, holders & ~b, offer)
                if s.gone & b:
                    n = new()
                    n.end(t, over, 1, rules["expiry_releases"])
                    yield "lease expires: " + name(w, t), n.packed(), 0
                    continue
                done = ("F" if bits(credited | b) >= nums[t] else "L", credited | b, holders & ~b, offer)
                n = new()
                n.end(t, done, 0, rules["complete_releases"])
                yield "complete " + name(w, t), n.packed(), b
                if s.left[0]:
                    n = spent(new(), 0)
                    n.hold = True
                    n.end(t, done, 0, rules["complete_releases"])
                    yield "complete with a hold " + name(w, t), n.packed(), None
                if s.left[1]:
                    n = spent(new(), 1)
                    n.end(t, over, 1, rules["expiry_releases"])
                    yield "fail " + name(w, t), n.packed(), None
                    n = spent(new(), 1)
                    n.end(t, ("X", credited, 0, offer), 0, rules["expiry_releases"])
                    yield "die " + name(w, t), n.packed(), None
        for t in range(T):
            status, credited, holders, offer = s.recs[t]
            if s.back[t]:
                n = new()
                n.back = put(n.back, t, n.back[t] - 1)
                n.enter(t)
                n.release()
                yield "backoff of t%d over" % t, n.packed(), 0
            if s.left[2] and status == "L":
                n = spent(new(), 2)
                n.end(t, ("X", credited, 0, offer), 0, rules["cancel_releases"])
                yield "cancel t%d" % t, n.packed(), None
            if s.left[3] and status == "L":
                n = spent(new(), 3)
                n.recs, n.back = put(n.recs, t, ("L", credited, 0, offer)), put(n.back, t, 0)
                n.enter(t)
                n.release()
                yield "requeue t%d" % t, n.packed(), None
        if s.left[4]:
            n = spent(new(), 4)
            n.limit = 1
            yield "the limit is 1 now", n.packed(), None
        if s.left[5]:
            n = spent(new(), 5)
            n.limit += 1
            if rules["raise_releases"]:
                n.release()
            yield "the limit is 1 more", n.packed(), None
        if s.cool:
            n = new()
            n.cool = False
            yield "the time of the pace is over", n.packed(), 0
        if s.hold:
            n = new()
            n.hold = False
            yield "the hold is over", n.packed(), 0
        if s.timer and not s.cool and not s.hold:
            n = new()
            n.timer = False
            n.release()
            yield "promote", n.packed(), 0

    def invariant(state):
        if state[-1]:
            return state[-1]
        s = Key(state[:-1], rules)
        for t in range(T):
            n = sum(s.counts(u, o) for line in s.line for u, o in line if u == t)
            n += sum(s.counts(u, o) for lane in s.lanes for u, o, _ in lane if u == t)
            if n > 1:
                return "t%d stands twice" % t
        return None

    goal = lambda state: all(r[0] != "L" for t, r in enumerate(state[2]) if only is None or t in only)
    return init, actions, invariant, goal, [(1 << W) - 1]


# ------------------------------------------------------------------ model 11: what of a limit key waits in SQL
# state: of each task n (stored, on its way), c (answered crowded, not parked yet), s (a row in SQL), b (released into Redis, the
# row not marked yet), r (in Redis), D (done, the row not marked yet), d (done), x (lost); whether the key has the flag, whether a
# watchdog has read that there is no row, whether the process keeps new tasks in SQL unasked, kills left
def crowd(N=4, most=2, kills=2, walk=True, parks_first=True, refills=True):
    init = ("n" * N, False, False, False, kills)

    def actions(state):
        tasks, flag, saw_none, hint, k = state
        to = lambda i, c: tasks[:i] + c + tasks[i + 1:]
        there = tasks.count("r") + tasks.count("b")
        for i, c in enumerate(tasks):
            if c == "n" and hint:
                yield "t%d stays in SQL" % i, (to(i, "s"), flag, saw_none, hint, k), 0
            if c == "n" and there < most and not flag:
                yield "enqueue t%d" % i, (to(i, "r"), flag, saw_none, hint, k), 0
            elif c == "n":
                yield "enqueue t%d: crowded" % i, (to(i, "c"), True, saw_none, True, k), 0
            if c == "c":
                yield "park t%d" % i, (to(i, "s"), flag, saw_none, hint, k), 0
                if k:
                    yield "killed before t%d is parked" % i, (to(i, "n" if parks_first else "x"), flag, saw_none, False, k - 1), None
            if c in "rb":
                yield "t%d done" % i, (to(i, "d" if c == "r" else "D"), flag, saw_none, hint, k), 0
            # Until a mark the row is there, and is released again: the queue knows the task (model "release").
            if c in "bD":
                yield "mark t%d" % i, (to(i, "r" if c == "b" else "d"), flag, saw_none, hint, k), 0
        if hint:
            yield "the process asks again", (tasks, flag, saw_none, False, k), None
        if flag and refills and there <= most // 2 and not saw_none:
            i = tasks.find("s")
            if i >= 0:
                yield "refill t%d" % i, (to(i, "b"), flag, saw_none, hint, k), 0
            else:
                yield "the watchdog sees no row", (tasks, flag, True, hint, k), 0
        if saw_none:
            yield "the watchdog takes the flag", (tasks, False, False, False, k), 0
        if walk and not flag and "s" in tasks:
            yield "walk", (tasks, True, saw_none, hint, k), 0

    def invariant(state):
        there = state[0].count("r") + state[0].count("b")
        return "a task is lost" if "x" in state[0] else "more than the bound in Redis" if there > most else None

    return init, actions, invariant, lambda s: set(s[0]) == {"d"}, [1]


# ------------------------------------------------------------------ model 9: a sequence
# Tasks: u not inserted, l the insert has seen a head, w behind, o head and in the outbox, p in the queue, d completed,
# D dead, H dead and behind, x purged. A record may be on the bus twice; the second one arrives at any time.
def sequence(N=3, deaths=1, kills=1, resends=1, twice=1, holds=False, locks=True, ends_release=True, purge_releases=True,
             resent_waits=True, old_are_asked=True, lowest_first=True, repeat_asks=True, dead_waits=True):
    init = ("u" * N, -1, False, 0, 0, deaths, kills, resends, twice)

    def actions(state):
        tasks, head, owed, old, again, dies, k, sends, doubles = state
        rest = (old, again, dies, k, sends, doubles)
        to = lambda i, c, of=None: (of or tasks)[:i] + c + (of or tasks)[i + 1:]

        def release(of):
            behind = [j for j, c in enumerate(of) if c in "wH"]
            if not behind:
                return of, -1
            j = min(behind) if lowest_first else max(behind)
            return to(j, "D" if of[j] == "H" else "o", of), j

        def end(i, c, dies):
            after, first, owes = to(i, c), head, owed
            if head == i and not (c == "D" and holds):
                first, owes = -1, not ends_release
                if ends_release:
                    after, first = release(after)
            return after, first, owes, old, again, dies, k, sends, doubles

        for i, c in enumerate(tasks):
            if c == "u" and "u" not in tasks[:i] and "l" not in tasks:
                if head < 0 and not owed:
                    yield "insert t%d" % i, (to(i, "o"), i, owed, *rest), 0
                else:
                    yield "insert t%d" % i, (to(i, "w" if locks else "l"), head, owed, *rest), 0
            if c == "l":
                yield "t%d is stored behind" % i, (to(i, "w"), head, owed, *rest), 0
            if c == "o":
                yield "publish t%d" % i, (to(i, "p"), head, owed, *rest), 0
                if doubles:
                    yield "publish t%d twice" % i, (to(i, "p"), head, owed, old | 1 << i, again, dies, k, sends, doubles - 1), None
            if doubles and c in "wp":     # its COMMIT was not answered, or another feeder had stored it: the caller publishes what goes
                after = to(i, "p") if c == "w" and not repeat_asks else tasks
                later = old | 1 << i if c == "p" else old
                yield "insert t%d again" % i, (after, head, owed, later, again, dies, k, sends, doubles - 1), None
            if old >> i & 1:
                arrives = c == "o" or c == "w" and not old_are_asked
                yield "the second record of t%d" % i, (to(i, "p") if arrives else tasks, head, owed, old & ~(1 << i), *rest[1:]), 0
            if c == "p":
                yield "t%d completed" % i, end(i, "d", dies), 1
                if dies:
                    yield "t%d dies" % i, end(i, "D", dies - 1), None
            if c == "w" and dies:
                yield "t%d dies while it waits" % i, \
                    (to(i, "H" if holds and dead_waits else "D"), head, owed, old, again, dies - 1, k, sends, doubles), None
            if c == "H":
                yield "t%d is purged while it waits" % i, (to(i, "x"), head, owed, *rest), 0
                if sends:
                    yield "t%d is sent again while it waits" % i, \
                        (to(i, "w"), head, owed, old, again | 1 << i, dies, k, sends - 1, doubles), None
            if c == "D" and sends:
                waits = head not in (i, -1) and resent_waits
                first = i if head < 0 else head
                yield "t%d is sent again" % i, (to(i, "w" if waits else "o"), first, owed, old, again | 1 << i, dies, k, sends - 1, doubles), None
            if c == "D" and holds and head == i:
                after, first = to(i, "x"), -1
                if purge_releases:
                    after, first = release(after)
                yield "t%d is purged" % i, (after, first, owed, *rest), 0
        if owed:
            yield "release", (*release(tasks), False, *rest), 0
            if k:
                yield "killed before the release", (tasks, head, False, old, again, dies, k - 1, sends, doubles), None

    def invariant(state):
        tasks, again = state[0], state[4]
        first = [i for i, c in enumerate(tasks) if c in "op"]
        if len(first) > 1:
            return "two tasks of the sequence are out of SQL"
        if any(c == "w" and not again >> j & 1 and first and j < first[0] for j, c in enumerate(tasks)):
            return "a task has overtaken another"
        if holds and any(c in "DH" and not again >> j & 1 and first and j < first[0] for j, c in enumerate(tasks)):
            return "a task has overtaken a dead one that holds"
        return None

    return init, actions, invariant, lambda s: set(s[0]) <= set("dx" if holds else "dxD"), [1]


# ------------------------------------------------------------------ scenarios
HOLDS, BREAKS = "holds", "breaks"
KEY_A = dict(W=3, nums=(1, 1, 2), holds=1, fails=1, cancels=1)
KEY_B = dict(W=3, nums=(2, 1, 1), C=2, pace=False, holds=1, fails=1)
KEY_D = dict(W=3, nums=(2, 2), C=2, fails=1, requeues=1)
KEY_E = dict(W=2, nums=(1, 1, 1), prios=(1, 0, 1), C=2, pace=False, holds=1, fails=1, lowers=1, raises=1)
KEY_F = dict(W=1, nums=(2, 1), holds=1, fails=1, only=(1,))
KEY_G = dict(W=2, nums=(1, 2), prios=(1, 0), C=1, requeues=2, fails=1)
# ------------------------------------------------------------------ model: the feed of a subscription
# state: (pub, base, anew, pos, replay, reads, skip, tasks, ran, feeders, left, backup)
#  pub, base     records of the log that were published, and deleted by retention; anew: the log was made anew
#  pos, replay   the position: the next record, and the replay number; reads, skip: counted by it
#  tasks         per replay and record: 0 none, 1 stored, 2 done, 3 removed from SQL
#  ran           per log and record: how often its tasks ran
#  feeders       two, because a lease may run out: None, or (step, from, begin, to)
#  left          kills, deletions by retention, a remade log, a set back SQL
#  backup        what SQL had, or None
def feed(N=3, kills=1, deletes=1, remakes=0, back=0, same_ids=True, insert_first=True, cas=True, stays=True,
         counts_skipped=True, new_replay=True, together=True):
    def init():
        tasks = ((0,) * N, (0,) * N)
        return (0, 0, 0, 0, 0, 0, 0, tasks, tasks, (None, None), (kills, deletes, remakes, back), None)

    def total(s):
        return N + 1 if s[2] else N

    def published(s):
        return N + s[0] if s[2] else s[0]

    def put(rows, replay, rec, value):
        row = rows[replay][:rec] + (value,) + rows[replay][rec + 1:]
        return (row, rows[1]) if replay == 0 else (rows[0], row)

    def moved(s, at):
        pub, base, anew, pos, replay, reads, skip, tasks, ran, feeders, left, backup = s
        _, begin_from, begin, to = at
        if cas and pos != begin_from:
            return s
        if counts_skipped:
            for rec in range(begin_from, begin):
                skip |= 1 << rec
        return (pub, base, anew, to, replay, reads + to - begin, skip, tasks, ran, feeders, left, backup)

    def inserted(s, at):
        tasks, ran = s[7], s[8]
        for rec in range(at[2], at[3]):
            if tasks[s[4]][rec] in (0, 3):
                tasks = put(tasks, s[4], rec, 1)
            elif not same_ids:
                # Another task, which will run, too.
                ran = put(ran, s[2], rec, ran[s[2]][rec] + 1)
        return s[:7] + (tasks, ran) + s[9:]

    def actions(s):
        pub, base, anew, pos, replay, reads, skip, tasks, ran, feeders, left, backup = s
        if pub < (1 if anew else N):
            yield "publish", (pub + 1,) + s[1:], 0
        if pos > pub and anew and replay == 0:
            row = (pub, base, anew, 0, 1 if new_replay else 0, reads, skip, tasks, ran, feeders, left, backup)
            yield "the log ends before the position", row, 0
        for f in range(2):
            at = feeders[f]
            def with_feeder(s, value):
                both = list(s[9])
                both[f] = value
                return s[:9] + (tuple(both),) + s[10:]
            if at is None:
                begin = max(pos, base)
                # Pages of one record, and of all.
                for to in {begin + 1, pub}:
                    if pos < pub and begin < to <= pub:
                        yield "read", with_feeder(s, ("read", pos, begin, to)), 0
                continue
            first, second = (inserted, moved) if insert_first else (moved, inserted)
            if at[0] == "read":
                yield "first step", with_feeder(first(s, at), ("half",) + at[1:]), 0
            else:
                yield "second step", with_feeder(second(s, at), None), 0
            if left[0]:
                n = with_feeder(s, None)
                yield "kill", n[:10] + ((left[0] - 1,) + left[1:],) + n[11:], None
        for r in range(2):
            for rec in range(N):
                if tasks[r][rec] == 1:
                    log = 1 if r == 1 else (anew if not new_replay else 0)
                    n = s[:7] + (put(tasks, r, rec, 2), put(ran, log, rec, ran[log][rec] + 1)) + s[9:]
                    yield "run", n, 0
                # An hour is longer than any feeder needs for a page.
                in_hand = any(at and at[2] <= rec < at[3] for at in feeders)
                if tasks[r][rec] == 2 and (not stays or not in_hand and (r < replay or rec < pos)):
                    yield "remove", s[:7] + (put(tasks, r, rec, 3),) + s[8:], None
        if left[1] and base < pub - 1:
            yield "retention", (pub, base + 1) + s[2:10] + ((left[0], left[1] - 1) + left[2:],) + s[11:], None
        if left[2] and pub == N and pos == N and feeders == (None, None):
            yield "remade", (0, 0, 1) + s[3:10] + (left[:2] + (0,) + left[3:],) + s[11:], None
        if left[3] and backup is None:
            yield "backup", s[:11] + ((pos, replay, reads, skip, tasks),), None
        if left[3] and backup is not None:
            old = backup if together else (pos, replay, reads, skip, backup[4])
            # taskd does not run meanwhile.
            n = s[:3] + old + (s[8], (None, None), left[:3] + (0,), backup)
            yield "SQL set back", n, None

    def invariant(s):
        if s[5] + bits(s[6]) > published(s):
            return "a record counts twice"
        most = 2 if back and not s[10][3] else 1
        if any(times > most for row in s[8] for times in row):
            return "a record was processed twice"

    def goal(s):
        pub, _, anew, pos, replay, reads, skip, tasks = s[:8]
        if pub < (1 if anew else N) or pos != pub or s[9] != (None, None):
            return False
        if reads + bits(skip) != total(s):
            return False
        done = lambda r, rec: tasks[r][rec] in (2, 3) or (r == 0 and skip >> rec & 1)
        if not all(done(replay, rec) for rec in range(pub)):
            return False
        return not any(1 in row for row in tasks)
    return init(), actions, invariant, goal, [0]


SCENARIOS = [
    # the queue, as fixed
    ("queue NUM=1,2: claim complete fail expire", HOLDS, lambda: queue(nums=(1, 2), fails=2)),
    ("queue NUM=2,2: ", HOLDS, lambda: queue(nums=(2, 2), fails=1)),
    ("queue NUM=3: deep retries", HOLDS, lambda: queue(nums=(3,), fails=5, bound=1)),
    ("queue NUM=2: deep retries, exactly NUM workers", HOLDS, lambda: queue(W=2, nums=(2,), fails=7, bound=1)),
    ("queue NUM=1,3: ", HOLDS, lambda: queue(nums=(1, 3), fails=2)),
    ("queue NUM=1,2: P entries dropped at any time", HOLDS, lambda: queue(nums=(1, 2), fails=1, drops=2)),
    ("queue NUM=2,1: cancel, rebuild", HOLDS, lambda: queue(nums=(2, 1), fails=1, cancels=1, rebuilds=1)),
    ("queue NUM=1,2: stuck tail rotated to the head", HOLDS, lambda: queue(nums=(1, 2), fails=3, rotate=True)),
    ("queue NUM=2: pipeline delivers twice, enqueue asks the record", HOLDS, lambda: queue(nums=(2, 1), fails=1, dup_enq=1)),
    # only the newest element of a task offers
    ("newest NUM=1,2: claim complete fail expire", HOLDS, lambda: queue(nums=(1, 2), fails=2, newest="always")),
    ("newest NUM=3: deep retries", HOLDS, lambda: queue(nums=(3,), fails=5, bound=1, newest="always")),
    ("newest NUM=2: deep retries, exactly NUM workers", HOLDS, lambda: queue(W=2, nums=(2,), fails=7, bound=1, newest="always")),
    ("newest NUM=1,3: ", HOLDS, lambda: queue(nums=(1, 3), fails=2, newest="always")),
    ("newest NUM=1,2: P entries dropped at any time", HOLDS, lambda: queue(nums=(1, 2), fails=1, drops=2, newest="always")),
    ("newest NUM=2,1: cancel, rebuild", HOLDS, lambda: queue(nums=(2, 1), fails=1, cancels=1, rebuilds=1, newest="always")),
    ("newest NUM=1,2: stuck tail rotated to the head", HOLDS, lambda: queue(nums=(1, 2), fails=3, rotate=True, newest="always")),
    ("newest ablation: no new element where an older one stands", BREAKS, lambda: queue(W=2, nums=(2,), fails=2, newest="seldom")),
    # the queue, by the letter or with one rule taken away
    ("letter: retry element [1,0,task] beside the older one's room", BREAKS, lambda: queue(W=2, nums=(2,), fails=1, room="element")),
    ("letter, NUM=1 only", HOLDS, lambda: queue(nums=(1, 1), fails=3, room="element")),
    ("letter: expiry record in a topic, handled twice", BREAKS, lambda: queue(nums=(1,), fails=1, expiry="topic", dup_exp=1, room="element")),
    ("letter: task in `pipeline` twice, only the offset is checked", BREAKS, lambda: queue(nums=(1,), fails=0, dup_enq=1, enqueue_check=False, room="element")),
    ("ablation: pointer moves only when something was taken", BREAKS, lambda: queue(nums=(1, 2), fails=2, bound=1, advance="taken")),
    ("ablation: the task's record is not asked (pointer alone)", BREAKS, lambda: queue(nums=(2,), fails=1, ask_record=False, room="element")),
    ("ablation: C forgotten when the list is empty, P kept", BREAKS, lambda: queue(W=2, nums=(2,), fails=2, reset_c=True)),
    # the flow, as fixed
    ("flow NUM=1: kills between any two effects, zombie", HOLDS, lambda: flow(1, crash=1, zombie=1)),
    ("flow NUM=2: kills between any two effects, zombie", HOLDS, lambda: flow(2, crash=1, zombie=1, resend=0)),
    # the flow, by the letter
    ("letter flow: outbox republished, only the offset is checked", BREAKS, lambda: flow(1, crash=1, record=False, tombstone=False, sql_check=False, by_offset=False, cas=False)),
    ("letter flow: record asked, but forgotten when the task is done", BREAKS, lambda: flow(1, crash=1, tombstone=False, sql_check=False, by_offset=False, cas=False, resend=0)),
    ("letter flow: record kept until SQL has it, no SQL check", BREAKS, lambda: flow(1, crash=1, sql_check=False, cas=False)),
    ("letter flow: FLUSHALL while results are on their way", BREAKS, lambda: flow(1, crash=0, flush=1, barrier=False, settle_cap=False, cas=False, resend=0)),
    ("flow: FLUSHALL with barrier and cap", HOLDS, lambda: flow(1, crash=0, flush=1, resend=0)),
    ("flow: FLUSHALL, rebuilt by a walk that is killed", HOLDS, lambda: flow(1, crash=1, flush=1, resend=0, walk=True, maxlog=5)),
    ("flow: FLUSHALL twice, rebuilt by a walk", HOLDS, lambda: flow(1, crash=0, flush=2, resend=0, walk=True, maxlog=5)),
    ("flow NUM=2: FLUSHALL, rebuilt by a walk that is killed", HOLDS, lambda: flow(2, crash=1, flush=1, resend=0, walk=True, maxlog=5)),
    ("ablation flow: records of a rebuild are not flagged `again`", BREAKS, lambda: flow(1, crash=1, flush=1, resend=0, walk=True, walk_again=False, maxlog=5)),
    ("ablation flow: a rebuild stores its place first, and no mark", BREAKS, lambda: flow(1, crash=1, flush=1, resend=0, walk=True, place="first", maxlog=5)),
    ("letter flow: everysec, result forwarded before it is on disk", BREAKS, lambda: flow(1, crash=0, rollback=1, durable_first=False, settle_cap=False, resend=0)),
    ("letter flow: everysec, Kafka committed ahead of Redis, no gap check", BREAKS, lambda: flow(1, crash=0, rollback=1, cas=False, resend=0)),
    ("flow: everysec, gap check and durable before forwarding", HOLDS, lambda: flow(1, crash=0, rollback=1, resend=0)),
    # the shortcut from SQL into the queue, past the bus
    ("shortcut NUM=1: a fence; kills, a lost answer, an early watchdog", HOLDS, lambda: flow(1, crash=1, direct=True)),
    ("shortcut NUM=1: zombie fanout", HOLDS, lambda: flow(1, crash=0, zombie=1, direct=True)),
    ("shortcut NUM=2: ", HOLDS, lambda: flow(2, crash=1, resend=0, direct=True)),
    ("shortcut: FLUSHALL", HOLDS, lambda: flow(1, crash=0, flush=1, resend=0, direct=True)),
    ("shortcut: everysec", HOLDS, lambda: flow(1, crash=0, rollback=1, resend=0, direct=True)),
    ("ablation: shortcut without a fence", BREAKS, lambda: flow(1, crash=0, direct=True, fence=False)),
    # tasks that waited for room take it, too
    ("release: two watchdogs, two kills, a late call", HOLDS, lambda: release()),
    ("ablation release: the fence does not count what was forgotten", BREAKS, lambda: release(counts=False)),
    ("ablation release: a release does not move the fence", BREAKS, lambda: release(moves=False)),
    ("ablation release: the row is read before the fence", BREAKS, lambda: release(look_first=False)),
    # a dead task is sent again
    ("again: a late death, a repeated record, a final record that is still there", HOLDS, lambda: again()),
    ("again ablation: settling does not ask for the epoch", BREAKS, lambda: again(settle_asks=False)),
    ("again ablation: enqueue ignores every task that has a record", BREAKS, lambda: again(enqueue_replaces=False)),
    ("again ablation: a forgotten task begins with the offer of a new one", BREAKS, lambda: again(by_epoch=False)),
    # a task is cancelled
    ("cancel: against completion, publish in flight, kills, a lost Redis", HOLDS, lambda: cancel()),
    ("cancel: two kills, no lost Redis", HOLDS, lambda: cancel(kills=2, flush=0)),
    ("cancel ablation: SQL decides before the script", BREAKS, lambda: cancel(script_decides=False)),
    ("cancel ablation: no final record for a task that has not arrived", BREAKS, lambda: cancel(final_for_absent=False)),
    ("cancel ablation: the wish goes before SQL has the end", BREAKS, lambda: cancel(wish_until_sql=False)),
    ("cancel ablation: the script's answer counts after a rebuild", BREAKS, lambda: cancel(generation_asked=False)),
    ("cancel ablation: the record counts as one whose report is lost", BREAKS, lambda: cancel(flush=0, never_lost=False)),
    ("cancel ablation: an old record of the bus is not asked about", BREAKS, lambda: cancel(old_are_asked=False)),
    # an operator changes and requeues a live task
    ("live: NUM and priority", HOLDS, lambda: live(num=2, acts=3, fails=1, what=("num", "priority"))),
    ("live: requeue, away from a worker", HOLDS, lambda: live(num=2, acts=3, fails=2, what=("all", "away"))),
    ("live: requeue to a worker, without an end", HOLDS, lambda: live(num=2, acts=2, fails=2, what=("to", "away", "num"))),
    ("live: requeue to a worker for some time, and it never comes back", HOLDS,
     lambda: live(num=2, acts=2, fails=1, what=("to", "priority", "all"), timed=True, leaves=True)),
    ("live: everything", HOLDS, lambda: live(num=2, acts=3, fails=1)),
    ("live: workers give it back and rest", HOLDS, lambda: live(num=2, acts=1, fails=1, rests=2)),
    ("live: the only worker gives it back and rests", HOLDS, lambda: live(W=1, num=1, acts=0, fails=0, rests=3)),
    ("live ablation: a pointer passes an element from which its worker rests", BREAKS,
     lambda: live(W=1, num=1, acts=0, fails=0, rests=1, rest_stays=False)),
    ("live ablation: a change of NUM or priority offers nothing", BREAKS, lambda: live(change_offers=False)),
    ("live ablation: a lower NUM ends no lease", BREAKS, lambda: live(closes_excess=False)),
    ("live ablation: a requeue offers nothing", BREAKS, lambda: live(requeue_offers=False)),
    ("live ablation: a reservation outlives its worker", BREAKS, lambda: live(ends_with_worker=False)),
    ("live ablation: the end of a reservation offers nothing", BREAKS, lambda: live(timed=True, free_offers=False, leaves=True, what=("to",))),
    ("live ablation: a requeue for all leaves who was refused", BREAKS, lambda: live(acts=3, fails=2, all_lifts=False)),
    # two changes of one task at once, two reservations
    ("changes: two at once, one of them is killed", HOLDS, lambda: two_changes()),
    ("changes: two at once, both are killed", HOLDS, lambda: two_changes(kills=2)),
    ("changes: two at once, one of them is slow", HOLDS, lambda: two_changes(kills=0, slow=True)),
    ("changes ablation: one is slow, and nobody compares what was sent", BREAKS, lambda: two_changes(kills=0, compares=False, slow=True)),
    ("changes ablation: the wish of the second goes at once", BREAKS, lambda: two_changes(second_stays=False)),
    ("reservations: the second ends later", HOLDS, lambda: two_reservations((1, 2))),
    ("reservations: the second ends before", HOLDS, lambda: two_reservations((2, 1), kills=2)),
    ("reservations: the second has no end", HOLDS, lambda: two_reservations((1, 9))),
    ("reservations ablation: the later call replaces the end", BREAKS, lambda: two_reservations((1, 2), earlier_stays=False)),
    ("reservations ablation: an alarm goes while a call is between its steps", BREAKS, lambda: two_reservations((1, 2), waits=False)),
    ("reservations ablation: the queue does not say when it ends", BREAKS, lambda: two_reservations((1, 9), queue_knows=False)),
    # limits per key
    ("limit key: NUM 1 and 2, a pace, a hold, a failure, a cancel", HOLDS, lambda: key(**KEY_A)),
    ("limit key: two at a time, NUM 2 and 1, a hold, a failure", HOLDS, lambda: key(**KEY_B)),
    ("limit key: two at a time, a pace, a hold, a failure, a cancel", HOLDS,
     lambda: key(W=2, nums=(1, 1, 1), C=2, holds=1, fails=1, cancels=1)),
    ("limit key: two tasks for two workers, a failure, a requeue", HOLDS, lambda: key(**KEY_D)),
    ("limit key: two priorities, the limit lowered and raised", HOLDS, lambda: key(**KEY_E)),
    ("limit key: a task that lacks its second worker", HOLDS, lambda: key(**KEY_F)),
    ("limit key: two priorities, requeues", HOLDS, lambda: key(**KEY_G)),
    ("limit key ablation: no gate, in a hold", BREAKS, lambda: key(**KEY_B, gate=0)),
    ("limit key ablation: no gate, the limit lowered", BREAKS, lambda: key(**dict(KEY_E, holds=0), gate=0)),
    ("limit key ablation: no gate, a passed element", BREAKS, lambda: key(**KEY_D, gate=0)),
    ("limit key ablation: what the gate refuses does not go back", BREAKS, lambda: key(**KEY_A, gate_puts_back=0)),
    ("limit key ablation: complete does not release", BREAKS, lambda: key(**KEY_A, complete_releases=0)),
    ("limit key ablation: expiry does not release", BREAKS, lambda: key(**KEY_A, expiry_releases=0)),
    ("limit key ablation: cancel does not release", BREAKS, lambda: key(**KEY_A, cancel_releases=0)),
    ("limit key ablation: a raised limit does not release", BREAKS,
     lambda: key(W=2, nums=(1, 1), C=0, pace=False, raises=1, raise_releases=0)),
    ("limit key ablation: a passed element keeps its place", BREAKS, lambda: key(**KEY_F, pass_frees=0)),
    ("limit key ablation: the rest of NUM does not enter", BREAKS, lambda: key(**KEY_A, rest_enters=0)),
    ("limit key ablation: no timer for the pace", BREAKS, lambda: key(**KEY_A, timer_for_pace=0)),
    ("limit key ablation: no timer for a hold", BREAKS, lambda: key(**KEY_A, timer_for_hold=0)),
    ("limit key ablation: older elements and entries count", BREAKS, lambda: key(**dict(KEY_G, C=2), new_offer=0)),
    ("crowd: a bound, refill, walk, two kills", HOLDS, crowd),
    ("crowd ablation: no walk", BREAKS, lambda: crowd(walk=False)),
    ("crowd ablation: no refill", BREAKS, lambda: crowd(refills=False)),
    ("crowd ablation: the offset moves before the park", BREAKS, lambda: crowd(parks_first=False)),
    # the feed of a subscription
    ("feed: two feeders, a kill, retention", HOLDS, feed),
    ("feed: two kills", HOLDS, lambda: feed(N=2, kills=2)),
    ("feed: the log is made anew", HOLDS, lambda: feed(N=2, remakes=1)),
    ("feed: SQL is set back", HOLDS, lambda: feed(N=2, deletes=0, back=1)),
    ("feed ablation: new ids at each insert", BREAKS, lambda: feed(N=2, same_ids=False)),
    ("feed ablation: the position moves before the insert", BREAKS, lambda: feed(N=2, insert_first=False)),
    ("feed ablation: the position moves from anywhere", BREAKS, lambda: feed(N=2, cas=False)),
    ("feed ablation: a task leaves SQL before the position moves", BREAKS, lambda: feed(N=2, stays=False)),
    ("feed ablation: what retention took is not counted", BREAKS, lambda: feed(counts_skipped=False)),
    ("feed ablation: the same replay number for a log made anew", BREAKS, lambda: feed(N=2, remakes=1, new_replay=False)),
    ("feed ablation: the position is not set back with the tasks", BREAKS, lambda: feed(N=2, deletes=0, back=1, together=False)),
    # a sequence
    ("sequence: deaths, second records and inserts, sent again", HOLDS, lambda: sequence(N=4, deaths=2, resends=2)),
    ("sequence: a dead task holds the others", HOLDS, lambda: sequence(N=4, deaths=2, resends=2, holds=True)),
    ("sequence ablation: an insert looks at the head before it locks it", BREAKS, lambda: sequence(locks=False)),
    ("sequence ablation: the end and the release are two transactions", BREAKS, lambda: sequence(ends_release=False)),
    ("sequence ablation: a purge releases nothing", BREAKS, lambda: sequence(holds=True, purge_releases=False)),
    ("sequence ablation: a task that is sent again goes at once", BREAKS, lambda: sequence(resent_waits=False)),
    ("sequence ablation: an old record of the bus is not asked about", BREAKS, lambda: sequence(old_are_asked=False)),
    ("sequence ablation: a task that dies while it waits does not hold", BREAKS, lambda: sequence(holds=True, dead_waits=False)),
    ("sequence ablation: a repeated insert publishes what waits", BREAKS, lambda: sequence(repeat_asks=False)),
    ("sequence ablation: the last one that waits goes next", BREAKS, lambda: sequence(lowest_first=False)),
    # the bus on Redis Streams
    ("letter streams: consumer group + stored offset", BREAKS, lambda: streams()),
    ("streams: one owner reads in order after the stored offset", HOLDS, lambda: streams(owner=True)),
]


def main():
    wrong = 0
    for name, expect, make in SCENARIOS:
        if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
            continue
        t0 = time.time()
        init, actions, inv, goal, sets = make()
        parent, edges, bad = explore(init, actions, inv)
        if not bad:
            bad = stuck(parent, edges, goal, sets)
        got = BREAKS if bad else HOLDS
        ok = got == expect and not (bad and bad[0] == "STATE LIMIT")
        wrong += not ok
        print("%-8s %-62s %-7s %8d states %5.1fs" % ("ok" if ok else "NOT SO", name, got, len(parent), time.time() - t0), flush=True)
        if bad:
            print("    ", bad[0])
            print("     ", " > ".join(trace(parent, bad[1])))
            if not ok:
                print("      state", bad[1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
