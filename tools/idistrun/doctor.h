// doctor.h: idistrun --doctor: what idist finds on this machine, on one screen
//
// The report has one line for each item, and at most 24 lines. The lines are computed by functions
// of idist, so they show what a rank would see. The self test runs first, because other lines use
// its results.
//
//     doctor_line.h       prints a line
//     doctor_settings.h   the environment: launcher, meeting, file store, settings, secret
//     doctor_test.h       the self test
//     doctor_machine.h    cores, shared memory, limits
//     doctor_network.h    interfaces and addresses
//     doctor_library.h    MPI, NCCL, GPUs
#pragma once

#include "doctor_library.h"
#include "doctor_line.h"
#include "doctor_machine.h"
#include "doctor_network.h"
#include "doctor_settings.h"
#include "doctor_test.h"

// Prints all lines. Returns the exit code, which is 1 if something is wrong.
static int doctor_run(void) {
    doctor_settings_read();
    doctor_test_run_all();

    doctor_machine_print_cores();
    doctor_machine_print_shared_memory();

    doctor_network_print_interfaces();
    doctor_network_print_loopback();
    doctor_network_print_address();

    doctor_settings_print_launcher();
    doctor_settings_print_meeting();
    doctor_settings_print_file_store();
    doctor_settings_print_variables();
    doctor_settings_print_secret();

    doctor_library_print_mpi();
    doctor_library_print_nccl();
    doctor_library_print_gpus();

    doctor_machine_print_limits();
    doctor_test_print_all();
    doctor_line_print_verdict();

    return doctor_lines.wrong_count ? 1 : 0;
}
