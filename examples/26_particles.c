// 26_particles.c - atoms of argon in a box: a program for one processor, adapted to many ranks
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/26_particles.c -o 26_particles
// run:    ./26_particles                  200 steps on one rank
//         ./26_particles 50               50 steps
//         idistrun -n 2 ./26_particles    on two ranks (tools/idistrun); or mpirun -n 2 ...
//
// expected output, on any number of ranks:
//    step 0: kinetic 1131.998, potential -3590.604, energy -2458.605, checksum 0xea727ce70faaf5e5
//    step 50: kinetic 971.302, potential -3429.989, energy -2458.686, checksum 0xf466650775383e1f
//    step 100: kinetic 1170.456, potential -3629.203, energy -2458.748, checksum 0xcce8ed7e61b6b6d4
//    step 150: kinetic 1251.947, potential -3710.759, energy -2458.812, checksum 0x101f8ce8f8db414c
//    step 200: kinetic 1371.324, potential -3830.174, energy -2458.851, checksum 0x52548bb3d40e839b
//
// The serial program is examples/before/26_particles.c; the comment at its top explains the
// physics. docs/examples.md shows the difference, which is 9 lines and an include. The work is
// divided as follows:
//
//     forces       Each of n ranks computes the forces on every n-th atom and sets all others to 0.
//                  An all_reduce adds these arrays, so that every rank has all forces. Nearly all
//                  of the time is spent here, because each atom interacts with all other atoms.
//     potential    Each rank adds up the potential of its own atoms. An all_reduce adds the sums.
//     the rest     All ranks have the same forces and move all atoms, without any message.
//
// On any number of ranks the positions have the same bits as in the serial program. One rank
// computes the whole force on an atom, in the same order as the serial program, and all other ranks
// add 0. The potential is added up in a different order for each number of ranks, and may differ in
// digits that are not printed.
//
// Exits with 0, or with 1 if something failed or an argument is bad.
#include "../idist.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

// A cube of atoms in a cube of walls.
enum { SIDE = 10, ATOMS = SIDE * SIDE * SIDE, REPORTS = 4, MAX_STEPS = 1000000 };

static const double SPACING = 1.2, WALL = 14.0, DT = 0.004, SPEED = 1.5;

typedef struct vec {
    double x, y, z;
} vec;

static vec position[ATOMS], velocity[ATOMS], force[ATOMS];

static void fail(const char *why) {
    fprintf(stderr, "26_particles: %s\n", why);
    exit(1);
}

static vec add(vec a, double k, vec b) { // a + k b
    vec sum = {a.x + k * b.x, a.y + k * b.y, a.z + k * b.z};

    return sum;
}

// ---- the start ----

static double random_unit(void) { // -1 <= x < 1, by Knuth's MMIX generator
    static uint64_t state = 26;

    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-52 - 1.0;
}

// Places the atoms on a lattice in the middle of the box, with random velocities that add up to 0.
static void place_atoms(void) {
    double margin = (WALL - SPACING * (SIDE - 1)) / 2;
    vec mean = {0, 0, 0};

    for (int i = 0; i < ATOMS; i++) {
        position[i].x = margin + SPACING * (i % SIDE);
        position[i].y = margin + SPACING * (i / SIDE % SIDE);
        position[i].z = margin + SPACING * (i / SIDE / SIDE);

        velocity[i].x = SPEED * random_unit();
        velocity[i].y = SPEED * random_unit();
        velocity[i].z = SPEED * random_unit();
        mean = add(mean, 1.0 / ATOMS, velocity[i]);
    }

    for (int i = 0; i < ATOMS; i++) velocity[i] = add(velocity[i], -1, mean);
}

// ---- a step ----

// Adds to *f the force that an atom at q exerts on an atom at p. Returns the energy of the pair.
static double interact(vec p, vec q, vec *f) {
    vec d = add(p, -1, q);
    double inverse2 = 1 / (d.x * d.x + d.y * d.y + d.z * d.z);
    double inverse6 = inverse2 * inverse2 * inverse2;
    double strength = 24 * inverse2 * inverse6 * (2 * inverse6 - 1);

    *f = add(*f, strength, d);

    return 4 * inverse6 * (inverse6 - 1);
}

// Reflects one coordinate of an atom that has passed through a wall, and reverses its speed.
static void reflect(double *place, double *speed) {
    if (*place >= 0 && *place <= WALL) return;

    *place = (*place < 0 ? 0 : 2 * WALL) - *place;
    *speed = -*speed;
}

// Computes the force on each atom at the current positions. Returns the potential energy.
static double compute_forces(void) {
    double potential = 0;

    for (int i = 0; i < ATOMS; i++) {
        vec f = {0, 0, 0};
        bool mine = i % idist_get_world_size() == idist_get_rank();

        for (int j = 0; mine && j < ATOMS; j++)
            if (j != i) potential += interact(position[i], position[j], &f) / 2;
        force[i] = f;
    }
    if (idist_all_reduce(force, force, 3 * ATOMS, IDIST_F64, IDIST_SUM, NULL))
        fail(idist_last_error());

    return potential;
}

static void kick_atoms(double dt) {
    for (int i = 0; i < ATOMS; i++) velocity[i] = add(velocity[i], dt, force[i]);
}

static void move_atoms(double dt) {
    for (int i = 0; i < ATOMS; i++) {
        vec *p = &position[i], *v = &velocity[i];

        *p = add(*p, dt, *v);
        reflect(&p->x, &v->x);
        reflect(&p->y, &v->y);
        reflect(&p->z, &v->z);
    }
}

static double kinetic_energy(void) {
    double sum = 0;

    for (int i = 0; i < ATOMS; i++) {
        const vec *v = &velocity[i];

        sum += (v->x * v->x + v->y * v->y + v->z * v->z) / 2;
    }

    return sum;
}

// ---- the program ----

// Returns the FNV-1a hash of the bits of all positions.
static uint64_t checksum(void) {
    const unsigned char *p = (const unsigned char *)position;
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < ATOMS * sizeof(vec); i++) hash = (hash ^ p[i]) * 0x100000001b3u;

    return hash;
}

static void report(int step, double kinetic, double potential) {
    if (idist_all_reduce(&potential, &potential, 1, IDIST_F64, IDIST_SUM, NULL))
        fail(idist_last_error());
    if (idist_get_rank() != 0) return;
    printf("step %d: kinetic %.3f, potential %.3f, energy %.3f, checksum 0x%016llx\n", step,
           kinetic, potential, kinetic + potential, (unsigned long long)checksum());
}

static int read_steps(const char *text) {
    char *end = NULL;
    long value = strtol(text, &end, 10);

    if (end == text || *end || value < 1 || value > MAX_STEPS) {
        fprintf(stderr, "26_particles: \"%s\": expected a number from 1 to %d\n", text, MAX_STEPS);
        exit(1);
    }

    return (int)value;
}

static void simulate(int steps) {
    double potential;

    place_atoms();
    potential = compute_forces();
    report(0, kinetic_energy(), potential);

    for (int step = 1; step <= steps; step++) {
        kick_atoms(DT / 2);
        move_atoms(DT);
        potential = compute_forces();
        kick_atoms(DT / 2);
        if (step * REPORTS / steps > (step - 1) * REPORTS / steps)
            report(step, kinetic_energy(), potential);
    }
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? read_steps(argv[1]) : 200;

    if (argc > 2) fail("usage: 26_particles [steps]");

    if (idist_initialize(NULL)) fail(idist_last_error());
    simulate(steps);
    if (idist_finalize()) fail(idist_last_error());
    return 0;
}
