// doctor_settings.h: the environment: the launcher, where ranks meet, IDIST_*, the secret
//
// Functions of idist read the environment twice: all settings, and then only the launcher's
// variables. So the launcher is known even if another setting is wrong.
#pragma once

#include "../../idist.h"
#include "doctor_line.h"

#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DOCTOR_SETTINGS_MEET_MS = 300 };

static struct {
    idist__config config;   // all settings
    idist__config launcher; // only the launcher's settings
    idist_status configured, detected;
    char why_not_configured[300], why_not_detected[300];
} doctor_settings;

// Reads the environment.
static void doctor_settings_read(void) {
    idist__config *config = &doctor_settings.config, *launcher = &doctor_settings.launcher;
    idist_desc none;

    doctor_settings.configured = idist__config_fill(config, NULL);
    if (doctor_settings.configured == IDIST_OK)
        doctor_settings.configured = idist__where_check_lone(config);
    if (doctor_settings.configured != IDIST_OK)
        doctor_line_copy_failure(doctor_settings.why_not_configured,
                                 sizeof doctor_settings.why_not_configured);

    memset(&none, 0, sizeof none);
    launcher->world_size = 1;
    launcher->local_rank = launcher->local_size = -1;
    launcher->may_draw = idist__where_is_file(&none);
    doctor_settings.detected = idist__detect_launcher(launcher);
    if (doctor_settings.detected != IDIST_OK)
        doctor_line_copy_failure(doctor_settings.why_not_detected,
                                 sizeof doctor_settings.why_not_detected);
}

// Returns true if a variable is set and not empty.
static bool doctor_settings_has(const char *name) {
    const char *value = getenv(name);

    return value && value[0];
}

// Prints the launcher that was detected.
static void doctor_settings_print_launcher(void) {
    const idist__config *c = &doctor_settings.launcher;
    bool in_job = c->launcher_kind == IDIST__LAUNCHER_NONE && getenv("SLURM_JOB_ID");
    char rank[32] = "an assigned rank";

    if (c->rank != IDIST__RANK_DRAWN) snprintf(rank, sizeof rank, "rank %d", c->rank);

    if (doctor_settings.detected != IDIST_OK)
        doctor_line_print("launcher", DOCTOR_WRONG, NULL, "%s", doctor_settings.why_not_detected);
    else if (c->launcher_kind == IDIST__LAUNCHER_NONE)
        doctor_line_print("launcher", in_job ? DOCTOR_NOTE : DOCTOR_FINE,
                          "in a job of Slurm, srun starts ranks", "none: a world of 1");
    else
        doctor_line_print("launcher", DOCTOR_FINE, NULL, "%s by %s%s%s: %s of %d", c->launcher,
                          c->rank_var ? c->rank_var : "", c->rank_var && c->size_var ? " and " : "",
                          c->size_var ? c->size_var : "", rank, c->world_size);
}

// Prints where the ranks meet. If a setting is wrong, another line says so.
static void doctor_settings_print_meeting(void) {
    const idist__meet *meet = &doctor_settings.config.meet;
    char text[IDIST__MEET_NBYTES];

    if (doctor_settings.detected != IDIST_OK || doctor_settings.configured != IDIST_OK) return;

    if (doctor_settings.launcher.world_size == 1)
        doctor_line_print("meeting", DOCTOR_FINE, NULL, "none needed: there is only one rank");
    else if (meet->kind == IDIST__MEET_NONE)
        doctor_line_print("meeting", DOCTOR_WRONG, "set MASTER_ADDR and MASTER_PORT",
                          "nothing says where the ranks meet");
    else
        doctor_line_print("meeting", DOCTOR_FINE, NULL, "%s",
                          idist__meet_print(meet, text, sizeof text));
}

// Opens a store in a file as server and as client. Returns IDIST_OK if server and client can
// exchange a value.
static idist_status doctor_settings_meet(const char *url) {
    idist_store_desc desc;
    idist_store *server = NULL, *client = NULL;
    char value[4];
    idist_status status;

    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = DOCTOR_SETTINGS_MEET_MS;
    desc.server = true;
    status = idist_store_open(url, &desc, &server);
    desc.server = false;
    if (status == IDIST_OK) status = idist_store_open(url, &desc, &client);
    if (status == IDIST_OK) status = idist_store_set(client, "key", "met", sizeof value);
    if (status == IDIST_OK)
        status = idist_store_get(server, "key", value, sizeof value, NULL, desc.timeout_ms);

    if (client) idist_store_close(&client);
    if (server) idist_store_close(&server);

    return status;
}

// Prints whether ranks can meet in a file. The test uses a new file in the folder of
// IDIST_INIT_METHOD, or in /tmp if IDIST_INIT_METHOD is not a file.
static void doctor_settings_print_file_store(void) {
    const char *method = getenv("IDIST_INIT_METHOD");
    bool is_needed = method && strncmp(method, "file:///", 8) == 0;
    const char *path = is_needed ? method + 7 : "/tmp/meet";
    int nbytes = (int)(strrchr(path, '/') - path);
    const char *advice = "for IDIST_INIT_METHOD=file:// take another folder";
    char url[PATH_MAX + 64], why[300];

    snprintf(url, sizeof url, "file://%.*s/idist-doctor-%ld", nbytes, path, (long)getpid());

    if (doctor_settings_meet(url) == IDIST_OK) {
        doctor_line_print("file store", DOCTOR_FINE, NULL,
                          "works: ranks can meet at file://%.*s/...", nbytes, path);
        return;
    }

    doctor_line_copy_failure(why, sizeof why);
    if (is_needed || strncmp(why, "IDIST_SECRET", 12) == 0)
        advice = NULL; // another folder would not help
    doctor_line_print("file store", is_needed ? DOCTOR_WRONG : DOCTOR_NOTE, advice, "%s", why);
}

// Prints the variables of idist, without the value of a secret.
static void doctor_settings_print_variables(void) {
    char text[600] = "";

    for (char **at = idist__os_process_variables(); *at; at++) {
        int nbytes = (int)strcspn(*at, "=");
        bool is_secret = strncmp(*at, "IDIST_SECRET=", 13) == 0;

        if (strncmp(*at, "IDIST_", 6) != 0) continue;
        idist__text_append(text, sizeof text, "%s%.*s", text[0] ? " " : "",
                           is_secret ? nbytes : (int)strlen(*at), *at);
    }

    if (doctor_settings.configured != IDIST_OK &&
        strcmp(doctor_settings.why_not_configured, doctor_settings.why_not_detected) != 0)
        doctor_line_print("settings", DOCTOR_WRONG, NULL, "%s", doctor_settings.why_not_configured);
    else doctor_line_print("settings", DOCTOR_FINE, NULL, "%s", text[0] ? text : "none of IDIST_*");
}

// Describes the secret. idist stops at the first wrong setting, so it may not have read the secret.
static const char *doctor_settings_describe_secret(void) {
    if (doctor_settings.config.secret.nbytes) return "given";
    if (doctor_settings_has("IDIST_SECRET") || doctor_settings_has("IDIST_SECRET_FILE"))
        return "given; see settings";
    if (doctor_settings.config.secret.insecure)
        return "none, and IDIST_INSECURE=1 trusts the network";
    return "none; ranks on several hosts need IDIST_SECRET";
}

// Prints whether there is a secret.
static void doctor_settings_print_secret(void) {
    doctor_line_print("secret", DOCTOR_FINE, NULL, "%s", doctor_settings_describe_secret());
}
