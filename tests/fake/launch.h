// launch.h - launches kernels on the stand-in for the CUDA runtime
//
// The stand-in cannot launch the examples' kernels. But the elements of these kernels do not depend
// on one another, and each element is a function for host and device. A launch is therefore a loop
// over the elements. The loop runs in the stream's thread, after the stream's earlier work.
// tests/device/examples.sh replaces <<<...>>> in a program with fake_launch.
#ifndef FAKE_LAUNCH_H
#define FAKE_LAUNCH_H

#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Returns a kernel's arguments, with device pointers replaced by pointers that this process can
// dereference.
template <typename A> static A fake_follow(A a) {
    void *word[sizeof a / sizeof(void *) + 1];
    memset(word, 0, sizeof word);
    memcpy(word, &a, sizeof a);
    for (size_t i = 0; i < sizeof a / sizeof(void *); i++)
        if (void *view = fake_host_view(word[i])) word[i] = view;
    memcpy(&a, word, sizeof a);
    return a;
}

template <typename T, typename A> struct fake_loop {
    void (*element)(T *, A, int);
    T *t;
    A a;
    int n;
    static void run(void *arg, uint64_t) {
        fake_loop *l = (fake_loop *)arg;
        for (int i = 0; i < l->n; i++) l->element(l->t, l->a, i);
    }
    static void drop(void *arg) { delete (fake_loop *)arg; }
};

template <typename T, typename A>
static void fake_launch(void (*element)(T *, A, int), T *t, A a, int n, cudaStream_t stream) {
    fake_loop<T, A> *l = new fake_loop<T, A>();
    fake_work work;
    l->element = element;
    l->t = fake_follow(t);
    l->a = fake_follow(a);
    l->n = n;
    memset(&work, 0, sizeof work);
    work.run = fake_loop<T, A>::run;
    work.drop = fake_loop<T, A>::drop;
    work.arg = l;
    if (l->t != t && fake_enqueue(stream, work) == cudaSuccess) return;
    fprintf(stderr, "fake_launch: no device memory, or no stream\n");
    abort();
}

#endif // FAKE_LAUNCH_H
