//go:build tools

// Package tools keeps Kueue among the modules that this one needs.
package tools

import _ "sigs.k8s.io/kueue/cmd/kueue"
