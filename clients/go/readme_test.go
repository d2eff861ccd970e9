package taskd_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The programs of README.md are those of internal/readme, which are compiled and, as a test, run; tests/it/docs.rs runs
// the worker.
func TestProgramsOfReadmeAreThoseThatAreCompiled(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(page), "\n```go\n")[1:]
	files := []string{"worker/main.go", "insert/main.go", "worker/main_test.go"}
	if len(parts) != len(files) {
		t.Fatalf("%d programs", len(parts))
	}
	for n, file := range files {
		program, _, _ := strings.Cut(parts[n], "```\n")
		own, err := os.ReadFile(filepath.Join("internal/readme", file))
		if err != nil {
			t.Fatal(err)
		}
		if string(own) != program {
			t.Errorf("internal/readme/%s is not the program of README.md", file)
		}
	}
}
