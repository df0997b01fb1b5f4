// launch: checks host lists, and which launcher, rank, size and meeting place follow from a given
// environment
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "tap.h"

#include <sys/resource.h>

//------------------------------------------------------------------------------
// host lists
//------------------------------------------------------------------------------

typedef struct hosts_case {
    const char *list, *expected; // NULL if the list is invalid
} hosts_case;

static const hosts_case hosts[] = {
    {"localhost", "localhost"},
    {"compute!:b24_[1-2].r", "compute!:b24_1.r compute!:b24_2.r"},
    {"quartz[4-8]", "quartz4 quartz5 quartz6 quartz7 quartz8"},
    {"c1001a-[11,17]", "c1001a-11 c1001a-17"},
    {"c1009a-s17,c1010a-s11", "c1009a-s17 c1010a-s11"},
    {"node[4-8,12,16-20,22,24-26]", "node4 node5 node6 node7 node8 node12 node16 node17 node18 "
                                    "node19 node20 node22 node24 node25 node26"},
    {"node[18-19,1-3,21-22]", "node18 node19 node1 node2 node3 node21 node22"},
    {"machine2-[02-4]vm1", "machine2-02vm1 machine2-03vm1 machine2-04vm1"},
    {"machine2-[02-3]vm1, machine4-[0003-5].vml2",
     "machine2-02vm1 machine2-03vm1 machine4-0003.vml2 machine4-0004.vml2 machine4-0005.vml2"},
    {"machine2-[009-11]vm1", "machine2-009vm1 machine2-010vm1 machine2-011vm1"},
    {"node[1,2,3]", "node1 node2 node3"},
    {"compute-b24-[1-3,5-9], compute-b25-[1,4,8],compute-b25-[2-9,13]",
     "compute-b24-1 compute-b24-2 compute-b24-3 compute-b24-5 compute-b24-6 compute-b24-7 "
     "compute-b24-8 compute-b24-9 "
     "compute-b25-1 compute-b25-4 compute-b25-8 compute-b25-2 compute-b25-3 compute-b25-4 "
     "compute-b25-5 compute-b25-6 "
     "compute-b25-7 compute-b25-8 compute-b25-9 compute-b25-13"},
    {"rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"},
    {"node[0-3]", "node0 node1 node2 node3"},
    {"node[00-03]", "node00 node01 node02 node03"},
    {"n[099-101]", "n099 n100 n101"},
    {"n[9-11]", "n9 n10 n11"},
    {"n[98-101]x[2]", "n98x2 n99x2 n100x2 n101x2"},
    {"invalid[]", NULL},
    {"a[3-1]", NULL},
    {"a[1", NULL},
    {"a]1[", NULL},
    {"a[1-]", NULL},
    {"a[x]", NULL},
    {"a[1,]", NULL},
    {"a[,1]", NULL},
    {"a[1-2-3]", NULL},
    {"a[[1]]", NULL},
    {"a[0-99999999]", NULL},
    {"a[1]]", NULL},
    {"a,,b", NULL},
    {",a", NULL},
    {"a,", NULL},
    {"", NULL},
};

static bool collect(void *arg, const char *host) {
    char *all = (char *)arg;
    if (all[0]) strcat(all, " ");
    if (strlen(all) + strlen(host) < 1900) strcat(all, host);
    return true;
}

static void one_list(const hosts_case *c) {
    char all[2048] = "";
    bool good = idist__slurm_each_host(c->list, collect, all);
    if (!c->expected) tap_ok(!good, "\"%s\" is no host list", c->list);
    else if (!tap_ok(good && strcmp(all, c->expected) == 0, "\"%s\"", c->list))
        tap_diag("got %d \"%s\"", good, all);
}

static bool second(void *arg, const char *host) {
    (void)host;
    return ++*(int *)arg < 2;
}

static void lists_that_are_long(void) {
    char list[600];
    int n = 0;
    memset(list, 'x', sizeof list);
    list[sizeof list - 1] = 0;
    tap_ok(!idist__slurm_each_host(list, collect, list), "a name that is too long");
    tap_ok(!idist__slurm_each_host("a[1-60000]", second, &n) && n == 2,
           "who has enough hosts says so");
}

static void tasks_per_node(void) {
    static const struct {
        const char *text;
        int node, tasks;
    } cases[] = {{"4", 0, 4},       {"2(x3),1", 0, 2},
                 {"2(x3),1", 2, 2}, {"2(x3),1", 3, 1},
                 {"3,1(x2)", 1, 1}, {"4", 1, -1},
                 {"", 0, -1},       {"x", 0, -1},
                 {"2(x3", 2, -1},   {"2(x0)", 0, -1},
                 {"2;3", 1, -1},    {"0", 0, -1},
                 {"2(y3)", 1, -1},  {"99999999999999", 0, -1},
                 {NULL, 0, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int got = idist__slurm_tasks(cases[i].text, cases[i].node);
        tap_ok(got == cases[i].tasks, "tasks of node %d in \"%s\": %d", cases[i].node,
               cases[i].text ? cases[i].text : "(none)", got);
    }
}

//------------------------------------------------------------------------------
// environments
//------------------------------------------------------------------------------

typedef struct launch_case {
    // In the form "A=1 B=2".
    const char *vars;
    // If the environment is an error, this is NULL, and the error text contains `where`.
    const char *launcher;
    int rank, size, local_rank, local_size;
    // Beginning of the meeting place, or "" if there is none. For an error, part of its text.
    const char *where;
} launch_case;

#define STEP "SLURM_JOB_ID=12345 SLURM_STEP_ID=0 "
#define TORCH "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2233 "
#define TF                                                                                         \
    "TF_CONFIG={\"cluster\":{\"chief\":[\"h0:2222\"],\"worker\":[\"h1:2222\",\"h2:2223\"],\"ps\":" \
    "[\"p:1\"]},\"task\":"

static const launch_case cases[] = {
    {"", "none", 0, 1, -1, -1, ""},
    // torch and related launchers
    {"RANK= WORLD_SIZE=", "none", 0, 1, -1, -1, ""},
    {"RANK=0", NULL, 0, 0, 0, 0, "WORLD_SIZE"},
    {"RANK=2 WORLD_SIZE=2", NULL, 0, 0, 0, 0, "RANK"},
    {"RANK=1x WORLD_SIZE=2", NULL, 0, 0, 0, 0, "RANK=1x"},
    {"RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456", "env", 1, 3, -1, -1,
     "tcp:job-master-0:23456"},
    {"RANK=0 WORLD_SIZE=2", "env", 0, 2, -1, -1, ""}, // no meeting place is given
    {"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2", "env", 0, 2, -1, 2, "unix:"},
    {"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1", "env", 0, 2, -1, 1, ""},
    {TORCH "TORCHELASTIC_RUN_ID=x LOCAL_WORLD_SIZE=2", "torchrun", 1, 2, 1, 2, "unix:"},
    {"RANK=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=2233 "
     "TORCHELASTIC_RUN_ID=x "
     "TORCHELASTIC_USE_AGENT_STORE=True",
     "torchrun", 1, 2, 0, 1, "torch:h:2233"},
    // a link-local address without its interface
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=9", NULL, 0, 0, 0, 0,
     "the address of rank 0, \"fe80::1\", is link-local"},
    {"RANK=0 WORLD_SIZE=2 IDIST_INIT_METHOD=tcp://[FEBF:1::1]:9", NULL, 0, 0, 0, 0, "link-local"},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=fe80::1%eth0 MASTER_PORT=9", "env", 0, 2, -1, -1,
     "tcp:[fe80::1%eth0]:9"},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=fec0::1 MASTER_PORT=9", "env", 0, 2, -1, -1,
     "tcp:[fec0::1]:9"},
    // horovodrun, Open MPI and others
    {"HOROVOD_RANK=0", NULL, 0, 0, 0, 0, "HOROVOD_SIZE"},
    {"HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 "
     "HOROVOD_GLOO_RENDEZVOUS_PORT=4",
     "horovodrun", 1, 2, 1, 2, "unix:"},
    {"PMI_RANK=0 PMI_SIZE=1 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 "
     "OMPI_COMM_WORLD_LOCAL_RANK=1 "
     "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3 PMIX_NAMESPACE=j",
     "openmpi", 3, 4, 1, 2, ""},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=j",
     "openmpi", 1, 2, -1, 2, "unix:"},
    {"MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2", "mvapich2", 1, 2, -1, -1,
     ""},
    {"JSM_NAMESPACE_RANK=5 JSM_NAMESPACE_SIZE=8 JSM_NAMESPACE_LOCAL_RANK=1 "
     "JSM_NAMESPACE_LOCAL_SIZE=4 PMIX_RANK=5 "
     "PMIX_NAMESPACE=j",
     "jsrun", 5, 8, 1, 4, ""},
    {"PALS_RANKID=1 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PMI_RANK=1", "pals", 1, 4, 1,
     2, ""},
    {"FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=1 PMI_RANK=1 PMI_SIZE=2", "flux", 1, 2, 1,
     -1, ""},
    {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "hydra", 1, 2, 1, 2, "unix:"},
    {"PMI_RANK=1", NULL, 0, 0, 0, 0, "PMI_SIZE"},
    {"PMIX_RANK=1 PMIX_NAMESPACE=j", NULL, 0, 0, 0, 0, "PMIX_RANK"},
    // Slurm
    {STEP
     "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=c1 SLURM_JOB_NUM_NODES=1",
     "slurm", 1, 2, 1, 2, "unix:"},
    {STEP
     "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_JOB_NODELIST=c1,c2 SLURM_JOB_NUM_NODES=2",
     "slurm", 1, 4, 1, -1, "tcp:c1:17345"},
    {STEP
     "SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_NTASKS=99 SLURM_STEP_NUM_TASKS=5 SLURM_JOB_NODELIST=z "
     "SLURM_STEP_NODELIST=n[3,1-2] SLURM_STEP_NUM_NODES=3 SLURM_NODEID=2 "
     "SLURM_STEP_TASKS_PER_NODE=3,1(x2)",
     "slurm", 4, 5, 0, 1, "tcp:n3:17345"},
    {"SLURM_JOB_ID=19999 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 "
     "SLURM_STEP_NUM_NODES=2 "
     "SLURM_STEP_NODELIST=a[1-2]",
     "slurm", 0, 2, -1, -1, "tcp:a1:15002"},
    {STEP "SLURM_PROCID=6 SLURM_LOCALID=0 SLURM_NTASKS=7 SLURM_NODEID=3 "
          "SLURM_TASKS_PER_NODE=2(x3),1 SLURM_JOB_NUM_NODES=4",
     "slurm", 6, 7, 0, 1, ""},
    {STEP "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=a[2-1]", NULL,
     0, 0, 0, 0, "a[2-1]"},
    {STEP "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=a[1-2] "
          "SLURM_DISTRIBUTION=arbitrary",
     "slurm", 1, 2, -1, -1, ""},
    {STEP "SLURM_PROCID=1", NULL, 0, 0, 0, 0, "SLURM_NTASKS"},
    {"SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NTASKS=8", "none", 0, 1, -1, -1, ""},
    {"SLURM_JOB_ID=1 SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_NTASKS=8", "none", 0, 1, -1, -1,
     ""},
    {"SLURM_JOB_ID=1 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8", "none", 0, 1, -1, -1,
     ""},
    {"SLURM_JOB_ID=1 SLURM_NTASKS=8", "none", 0, 1, -1, -1, ""},
    {STEP "SLURM_PROCID=0 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8", "openmpi",
     3, 8, -1, -1, ""},
    {STEP "SLURM_PROCID=0 SLURM_NTASKS=2 PMI_RANK=3 PMI_SIZE=8 MPI_LOCALRANKID=3", "hydra", 3, 8, 3,
     -1, ""},
    {STEP "SLURM_PROCID=1 SLURM_NTASKS=2 PMI_RANK=1 PMI_SIZE=2 SLURM_STEP_NUM_NODES=1", "slurm", 1,
     2, -1, 2, "unix:"},
    // Slurm and torch's variables
    {STEP TORCH "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1", "env", 1, 2, 1, -1, "unix:"},
    {STEP TORCH "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2", NULL, 0, 0, 0, 0,
     "inconsistent"},
    {STEP TORCH "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2", "env", 1, 2, 1, -1, "unix:"},
    {STEP "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 SLURM_PROCID=1 "
          "SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1",
     NULL, 0, 0, 0, 0, "inconsistent"},
    {STEP TORCH "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2 TORCHELASTIC_RUN_ID=x",
     "torchrun", 1, 2, 1, -1, "unix:"},
    // a script that exports RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS, and perhaps the address
    {STEP "RANK=1 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2 "
          "SLURM_JOB_NODELIST=c1,c2",
     "slurm", 1, 2, 0, -1, "tcp:c1:17345"},
    {STEP "RANK=1 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2 "
          "SLURM_JOB_NODELIST=c1,c2 MASTER_ADDR=h MASTER_PORT=9",
     "slurm", 1, 2, 0, -1, "tcp:h:9"},
    {STEP "RANK=1 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1",
     "slurm", 1, 2, 1, 2, "unix:"},
    // a loop of the user inside a step of one task
    {STEP "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=9 SLURM_PROCID=0 SLURM_NTASKS=1 "
          "SLURM_JOB_NUM_NODES=1",
     "env", 1, 2, -1, -1, "unix:"},
    // variables left over from another launcher
    {STEP "RANK=0 WORLD_SIZE=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1", NULL, 0, 0, 0,
     0, "RANK=0 and WORLD_SIZE=1 are inconsistent with SLURM_PROCID=1 and SLURM_NTASKS=2"},
    {STEP "RANK=1 WORLD_SIZE=4 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2", NULL, 0, 0, 0,
     0, "inconsistent"},
    {STEP "RANK=x WORLD_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1", NULL, 0, 0, 0,
     0, "RANK=x"},
    {"IDIST_LAUNCHER=slurm " STEP
     "RANK=0 WORLD_SIZE=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=1",
     "slurm", 1, 2, -1, 2, "unix:"},
    // Kubernetes and TensorFlow
    {"JOB_COMPLETION_INDEX=2 WORLD_SIZE=3 MASTER_ADDR=j-0.j MASTER_PORT=9", "indexed", 2, 3, -1, -1,
     "tcp:j-0.j:9"},
    {"JOB_COMPLETION_INDEX=2", "none", 0, 1, -1, -1, ""},
    {"JOB_COMPLETION_INDEX=3 WORLD_SIZE=3", NULL, 0, 0, 0, 0, "JOB_COMPLETION_INDEX"},
    {TF "{\"type\":\"chief\",\"index\":0}}", "tf_config", 0, 3, -1, -1, "tcp:h0:2222"},
    {TF "{\"type\":\"worker\",\"index\":1}}", "tf_config", 2, 3, -1, -1, "tcp:h0:2222"},
    {TF "{\"type\":\"ps\",\"index\":0}}", NULL, 0, 0, 0, 0, "TF_CONFIG"},
    {TF "{\"type\":\"worker\",\"index\":2}}", NULL, 0, 0, 0, 0, "TF_CONFIG"},
    {"TF_CONFIG={\"cluster\":{\"worker\":[\"a:1\"]},\"task\":{\"type\":\"worker\",\"index\":0}}",
     "tf_config", 0, 1, -1, -1, "tcp:a:1"},
    {TF "{\"type\":\"chief\",\"index\":1}}", NULL, 0, 0, 0, 0, "TF_CONFIG"},
    {TF "{\"type\":\"ter\",\"index\":0}}", NULL, 0, 0, 0, 0, "TF_CONFIG"},
    {TF "{\"type\":\"worker\",\"index\":2147483647}}", NULL, 0, 0, 0, 0, "TF_CONFIG"},
    {"TF_CONFIG={\"cluster\":{\"worker\":[\"\",\"b:1\"]},\"task\":{\"type\":\"worker\",\"index\":1}"
     "}",
     NULL, 0, 0, 0, 0, "TF_CONFIG"},
    {"IDIST_LAUNCHER=tf_config", NULL, 0, 0, 0, 0, "TF_CONFIG is not set"},
    {"IDIST_LAUNCHER=torchrun", NULL, 0, 0, 0, 0, "IDIST_LAUNCHER=torchrun"},
    {"IDIST_LAUNCHER=slurm SLURM_PROCID=0 SLURM_NTASKS=2", NULL, 0, 0, 0, 0,
     "SLURM_STEPID is not set"},
    {"TF_CONFIG={}", "none", 0, 1, -1, -1, ""},
    {"TF_CONFIG={\"environment\":\"cloud\",\"a\":[1,-2.5e3,true,null,{}],\"b\\\"\":{\"c\":[]}}",
     "none", 0, 1, -1, -1, ""},
    // damaged values; a launcher that is detected earlier does not look at TF_CONFIG
    {"TF_CONFIG={\"cluster\"", NULL, 0, 0, 0, 0, "TF_CONFIG is not a valid JSON"},
    {"TF_CONFIG={cluster:{worker:[a:1,b:1]},task:{type:worker,index:1}}", NULL, 0, 0, 0, 0,
     "TF_CONFIG is not a valid JSON object: wrong from character 2 on, \"cluster:"},
    {"TF_CONFIG={'cluster':{'worker':['a:1']}}", NULL, 0, 0, 0, 0, "character 2 on"},
    {"TF_CONFIG={\"environment\":", NULL, 0, 0, 0, 0, "character 16 on, its end. Fix it"},
    {"TF_CONFIG={\"environment", NULL, 0, 0, 0, 0, "character 2 on, \"\"environment\""},
    {"TF_CONFIG={\"a\":[1,2}", NULL, 0, 0, 0, 0, "character 10 on, \"}\""},
    {"TF_CONFIG={\"a\":1}}", NULL, 0, 0, 0, 0, "character 8 on"},
    {"TF_CONFIG=[]", NULL, 0, 0, 0, 0, "character 1 on"},
    {"TF_CONFIG=chief", NULL, 0, 0, 0, 0, "character 1 on"},
    {TF "{\"type\":\"worker\",\"index\":1}", NULL, 0, 0, 0, 0, "on, its end"},
    {"TF_CONFIG={ IDIST_LAUNCHER=none", "none", 0, 1, -1, -1, ""},
    {"TF_CONFIG={ HOROVOD_RANK=0 HOROVOD_SIZE=1", "horovodrun", 0, 1, -1, -1, ""},
    // the user's choice
    {"IDIST_LAUNCHER=none RANK=3 WORLD_SIZE=4", "none", 0, 1, -1, -1, ""},
    {"IDIST_LAUNCHER=openmpi RANK=0 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
     "openmpi", 1, 2, -1, -1, ""},
    {"IDIST_LAUNCHER=openmpi RANK=0 WORLD_SIZE=4", NULL, 0, 0, 0, 0, "OMPI_COMM_WORLD"},
    {"IDIST_LAUNCHER=slurm SLURM_PROCID=0 SLURM_NTASKS=2", NULL, 0, 0, 0, 0, "slurm"},
    {"IDIST_LAUNCHER=hydra " STEP "SLURM_PROCID=1 SLURM_NTASKS=2 PMI_RANK=1 PMI_SIZE=2", "hydra", 1,
     2, -1, -1, ""},
    {"IDIST_LAUNCHER=torchrun RANK=1 WORLD_SIZE=2", "env", 1, 2, -1, -1, ""},
    {"IDIST_LAUNCHER=rsh", NULL, 0, 0, 0, 0, "IDIST_LAUNCHER=rsh"},
    {"IDIST_LAUNCHER=rsh", NULL, 0, 0, 0, 0,
     "use one of none, idist, env, torchrun, indexed, horovodrun, openmpi, mvapich2, jsrun, pals, "
     "flux, hydra, slurm, tf_config"},
    // mpiexec -pmi-port, whose daemon is a Slurm task; nothing listens on the port
    {STEP "SLURM_PROCID=0 SLURM_NTASKS=1 PMI_PORT=127.0.0.1:1 PMI_ID=1", NULL, 0, 0, 0, 0,
     "PMI_PORT=127.0.0.1:1"},
    {"PMI_PORT=127.0.0.1:1", "none", 0, 1, -1, -1, ""},
    {"PMI_ID=1", "none", 0, 1, -1, -1, ""},
    {"IDIST_RANK=0 IDIST_WORLD_SIZE=2 RANK=7 WORLD_SIZE=8 IDIST_LOCAL_WORLD_SIZE=2", "idist", 0, 2,
     -1, 2, "unix:"},
};

static void one_environment(const launch_case *c) {
    char copy[800], place[IDIST__MEET_NBYTES];
    idist__config got;
    idist_status s;
    bool right;
    snprintf(copy, sizeof copy, "%s", c->vars);
    clearenv();
    for (char *save = NULL, *word = strtok_r(copy, " ", &save); word;
         word = strtok_r(NULL, " ", &save)) {
        char *value = strchr(word, '=');
        *value++ = 0;
        setenv(word, value, 1);
    }
    s = idist__config_fill(&got, NULL);
    idist__meet_print(&got.meet, place, sizeof place);
    if (!c->launcher) {
        if (!tap_ok(s == IDIST_ERR_ENV && strstr(idist_last_error(), c->where),
                    "\"%s\": an error about %s", c->vars, c->where))
            tap_diag("got %s: %s", idist_status_name(s), idist_last_error());
        return;
    }
    right = s == IDIST_OK && strcmp(got.launcher, c->launcher) == 0 && got.rank == c->rank &&
            got.world_size == c->size && got.local_rank == c->local_rank &&
            got.local_size == c->local_size &&
            (c->where[0] ? strncmp(place, c->where, strlen(c->where)) == 0 : !got.meet.kind);
    if (!tap_ok(right, "\"%s\": %s, rank %d of %d", c->vars, c->launcher, c->rank, c->size))
        tap_diag("got %s %s, rank %d of %d, local %d of %d, at \"%s\": %s", idist_status_name(s),
                 got.launcher, got.rank, got.world_size, got.local_rank, got.local_size, place,
                 idist_last_error());
}

// Starts two jobs of one launcher on one host. The two jobs must meet at different places, and all
// ranks of a job must meet at the same place.
static void jobs_apart(void) {
    idist__config c;
    idist__meet first;
    clearenv();
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    setenv("PMIX_NAMESPACE", "one", 1);
    tap_ok(idist__config_fill(&c, NULL) == IDIST_OK, "the first job");
    first = c.meet;
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
    tap_ok(idist__config_fill(&c, NULL) == IDIST_OK && strcmp(first.name, c.meet.name) == 0,
           "its other rank meets it");
    setenv("PMIX_NAMESPACE", "two", 1);
    tap_ok(idist__config_fill(&c, NULL) == IDIST_OK && strcmp(first.name, c.meet.name) != 0,
           "another job meets elsewhere");
    setenv("IDIST_TRANSPORT", "tcp", 1);
    tap_ok(idist__config_fill(&c, NULL) == IDIST_OK && c.meet.kind == IDIST__MEET_TCP &&
               strcmp(c.meet.host, "127.0.0.1") == 0,
           "by TCP if asked");
}

// Forbids new file descriptors, so that the network interfaces cannot be listed. The error must not
// claim that there are no addresses.
static void no_descriptor_left(void) {
    struct rlimit old, none;
    idist__own_address own;
    idist_status status;
    clearenv();
    getrlimit(RLIMIT_NOFILE, &old);
    none = old;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
    status = idist__interface_choose(NULL, &own);
    setrlimit(RLIMIT_NOFILE, &old);
    if (!tap_ok(status == IDIST_ERR_NO_FDS && strstr(idist_last_error(), "network interfaces"),
                "no descriptor to list the interfaces with"))
        tap_diag("got %s: %s", idist_status_name(status), idist_last_error());
    tap_like(idist_last_error(), "ulimit -n", "no descriptor: the text says what to raise");
}

// Lists interfaces into buffers that are too short. An address that does not fit must be left out
// as a whole, and the text must end in "...".
static void interfaces_that_do_not_fit(void) {
    char all[4096] = "", text[4096];
    size_t capacity, wrong = 0;

    idist__interface_list(all, sizeof all);

    for (capacity = 4; capacity <= strlen(all) + 1; capacity++) {
        size_t kept;

        text[0] = 0;
        idist__interface_list(text, capacity);
        if (strcmp(text, all) == 0) continue;

        kept = strlen(text) < 3 ? 0 : strlen(text) - 3; // length without the dots
        if (strcmp(text + kept, "...") != 0 || strncmp(text, all, kept) != 0 ||
            (kept > 0 && strncmp(text + kept - 2, ", ", 2) != 0)) {
            tap_diag("in %zu bytes: \"%s\"", capacity, text);
            wrong++;
        }
    }

    tap_ok(wrong == 0, "interfaces that do not fit");
    tap_ok(strcmp(text, all) == 0, "interfaces that just fit");
}

int main(void) {
    tap_deadline(60);
    for (size_t i = 0; i < sizeof hosts / sizeof hosts[0]; i++) one_list(&hosts[i]);
    lists_that_are_long();
    tasks_per_node();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) one_environment(&cases[i]);
    jobs_apart();
    no_descriptor_left();
    interfaces_that_do_not_fit();
    return tap_done();
}
