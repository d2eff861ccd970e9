// Package inmemory knows the servers of package taskdtest that run in this process.
package inmemory

import "sync"

var servers sync.Map

// Add notes the address of a server.
func Add(address string) { servers.Store(address, true) }

// Remove forgets it.
func Remove(address string) { servers.Delete(address) }

// Has tells whether a server has this address.
func Has(address string) bool {
	_, isThere := servers.Load(address)
	return isThere
}
