// Package taskd works on tasks of taskd, the task queue for work that grows while it is being done, and inserts them.
//
// A worker is a function that is called once for each task. [Worker] calls it for as many tasks at a time as
// [WorkerOptions.Concurrency] says, extends their leases while it runs, reports what it returns in batches, goes on
// when taskd is away for a while, and stops in order. It holds a stream on which taskd sends tasks as soon as they are
// there, or asks for them with long polls.
//
// [Client] inserts tasks, waits for their results, and reads, lists and cancels them. Package taskdtest runs handlers
// and workers in tests without a taskd.
package taskd
